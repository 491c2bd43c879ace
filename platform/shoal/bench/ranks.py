"""Processes of one thread each that measure together, and the decoder that they train."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException, spawn

from shoal.errors import WorkError
from shoal.models import DecoderConfig

_FOUND = "found.json"


def small_decoder(
    *, hidden_size: int, num_layers: int, vocab_size: int, context: int
) -> DecoderConfig:
    """A dense decoder of the usual proportions."""
    return DecoderConfig.from_hf(
        {
            "model_type": "llama",
            "hidden_size": hidden_size,
            "intermediate_size": hidden_size * 11 // 4,
            "num_hidden_layers": num_layers,
            "num_attention_heads": max(1, hidden_size // 64),
            "vocab_size": vocab_size,
            "max_position_embeddings": context,
            "tie_word_embeddings": False,
        }
    )


def run_ranks(work: Callable[..., Any], *args: Any, folder: Path, ranks: int) -> Any:
    """What ``work(*args)`` returns on the first of ``ranks``, all of which run it in one group.

    It is plain values, such as JSON has. Raises WorkError where a rank fails.
    """
    try:
        spawn(_run_rank, (work, args, folder, ranks), nprocs=ranks, daemon=True)
    except ProcessException as error:
        raise WorkError(f"A rank of the benchmark failed: {error}") from error
    return json.loads((folder / _FOUND).read_text())


def _run_rank(
    rank: int, work: Callable[..., Any], args: tuple[Any, ...], folder: Path, ranks: int
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks
    )
    found = work(*args)
    if rank == 0:
        (folder / _FOUND).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
