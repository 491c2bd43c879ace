"""Our engine as a contender: a ``worker`` that times the loads it is told.

{"prompts": [[…]], "new_tokens": 64}
@3.6
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

from shoal.bench.worker import say
from shoal.inference import Limits, Request, SamplingParams
from shoal.inference.engine import Engine
from shoal.inference.forward.model import ServedModel


def main(folder: str, batch_invariant: str, threads: str) -> None:
    """Serve the model in ``folder`` in bf16, in fixed order if ``batch_invariant`` is ``yes``."""
    torch.set_num_threads(int(threads))
    model = ServedModel.load(Path(folder), "bf16", batch_invariant=batch_invariant == "yes")
    say("ready")
    for line in sys.stdin:
        load = json.loads(line)
        say(_seconds(model, load["prompts"], load["new_tokens"]))


def _seconds(model: ServedModel, prompts: list[list[int]], new_tokens: int) -> float:
    limits = Limits(
        vocab_size=model.config.vocab_size,
        context_length=model.config.max_position_embeddings,
        num_blocks=len(prompts) * -(-(len(prompts[0]) + new_tokens) // 64),
        max_running=max(len(prompts), 1),
        prefix_cache=False,
    )
    engine = Engine(model, limits)
    params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    start = time.perf_counter()
    for number, prompt in enumerate(prompts):
        engine.add(Request(id=str(number), prompt=tuple(prompt), params=params))
    while engine.has_work:
        engine.step()
    return time.perf_counter() - start


if __name__ == "__main__":
    main(*sys.argv[1:])
