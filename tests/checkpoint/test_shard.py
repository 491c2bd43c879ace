"""A rank's file, byte for byte, before any value is in it."""

from __future__ import annotations

import io

import pytest
import torch
from torch.serialization import get_crc32_options, set_crc32_options

from shoal.checkpoint.entry import Entry
from shoal.checkpoint.shard import lay_out, memory_of


def _saved(tensor: torch.Tensor) -> bytes:
    """What ``torch.save`` makes of a tensor, without the checksums that change with values."""
    stream, before = io.BytesIO(), get_crc32_options()
    set_crc32_options(False)
    try:
        torch.save(tensor, stream)
    finally:
        set_crc32_options(before)
    return stream.getvalue()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (257, 66), (1, 64), (70_000, 3)], ids=str)
def test_a_tensor_is_framed_as_torch_saves_it(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = torch.randint(0, 100, shape).to(dtype)
    entry = Entry(path=("x",), shape=tensor.shape, row_start=0, local=tensor)
    layout = lay_out(0, [entry], [])
    (_, head), (_, tail) = layout.frames
    assert head + bytes(memory_of(tensor)) + tail == _saved(tensor)
    assert layout.slots[0].start == len(head)
