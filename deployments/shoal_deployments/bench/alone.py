"""The engine by itself, as its actor has it: a ``worker`` that times the requests it is told.

{"prompts": [[…]], "new_tokens": 64}
@{"seconds": 3.6, "first_s": [0.4, …]}
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

from shoal.bench.worker import say
from shoal.config import load_serve_config
from shoal.inference import Request, SamplingParams
from shoal.inference.engine import Engine
from shoal.inference.loading import load_engine


def main(folder: str, *overrides: str) -> None:
    """Answer until the input ends."""
    config = load_serve_config(Path(folder), overrides)
    torch.set_num_threads(config.serve.threads)
    engine = load_engine(config.folder, config.serve)
    say("ready")
    for round_number, line in enumerate(sys.stdin):
        say(_timed(engine, f"{round_number}", **json.loads(line)))


def _timed(
    engine: Engine, name: str, prompts: list[list[int]], new_tokens: int
) -> dict[str, object]:
    params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    first_s: dict[str, float] = {}
    begin = time.perf_counter()
    for place, prompt in enumerate(prompts):
        engine.add(Request(id=f"{name}-{place}", prompt=tuple(prompt), params=params))
    while engine.has_work:
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            first_s.setdefault(output.request_id, now - begin)
    return {"seconds": time.perf_counter() - begin, "first_s": list(first_s.values())}


if __name__ == "__main__":
    main(*sys.argv[1:])
