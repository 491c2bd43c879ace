"""Recorded launches: the same results on new inputs, and nothing of torch's among them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from shoal.ops.fixed import Arena, CannotRecord, PackedLinear, recording, rms_norm, swiglu
from shoal.ops.on_threads import on_threads


def layer(x: torch.Tensor, linear: PackedLinear, weight: torch.Tensor) -> torch.Tensor:
    gate, up = linear(rms_norm(x, weight, 1e-6)).chunk(2, dim=1)
    return swiglu(gate, up)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_program_computes_what_was_recorded_on_new_inputs(threads: int) -> None:
    with on_threads(threads):
        linear = PackedLinear.pack(torch.randn(3 * 128, 64), kind="bf16")
        weight = torch.rand(64)
        x = torch.randn(5, 64).bfloat16()
        first = layer(x, linear, weight)
        with recording(Arena()) as program:
            result = layer(x, linear, weight)
        assert len(program.launches) == 3
        assert torch.equal(result, first)
        for _ in range(3):
            new = torch.randn(5, 64).bfloat16()
            x.copy_(new)
            program.run()
            assert torch.equal(result, layer(new, linear, weight))


def test_programs_share_an_arena_and_keep_their_results() -> None:
    linear, weight = PackedLinear.pack(torch.randn(128, 64), kind="fp32"), torch.rand(64)
    arena = Arena()
    inputs = [torch.randn(rows, 64) for rows in (3, 3, 4)]
    programs, results = [], []
    for x in inputs:
        with recording(arena) as program:
            results.append(layer(x, linear, weight))
        programs.append(program)
    size = arena.num_bytes
    assert len({result.data_ptr() for result in results}) == 3
    expected = [layer(x, linear, weight) for x in inputs]
    for program in programs:
        program.run()
    for result, each in zip(results, expected, strict=True):
        assert torch.equal(result, each)
    # What lies between is shared: another program of this size takes memory for its result alone.
    with recording(arena):
        results.append(layer(inputs[0], linear, weight))
    assert arena.num_bytes - size <= 1024


def test_what_torch_computes_cannot_be_recorded() -> None:
    x = torch.randn(4, 6)
    computations: tuple[Callable[[], torch.Tensor], ...] = (
        lambda: x + 1,
        lambda: x.t().contiguous(),
        lambda: x.zero_(),
    )
    for computation in computations:
        with pytest.raises(CannotRecord), recording(Arena()):
            computation()
    with recording(Arena()) as program:
        x.t().view(6, 2, 2)[1:]
    program.run()
    assert len(program.launches) == 0
