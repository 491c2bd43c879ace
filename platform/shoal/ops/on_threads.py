"""On how many threads torch, and with it the kernels here, compute for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def on_threads(number: int) -> Iterator[None]:
    """Compute on ``number`` threads within this block, and on as many as before after it."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
