"""Weights that travel in MXFP8: bits, bytes and what is refused (A13)."""

from __future__ import annotations

import math
import weakref
from typing import cast

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from shoal.config import Level
from shoal.errors import ConfigError, WorkError
from shoal.fsdp import (
    GlobalLayout,
    Ledger,
    MixedPrecision,
    Transport,
    fully_shard,
    fully_shard_context,
    fully_shard_optimizer,
    microbatch,
    sharded_parameters,
)
from shoal.fsdp.inventory import groups_of
from shoal.fsdp.planes import Plane, decode, encode, plane_layout
from shoal.ops import mxfp8_linear
from shoal.ops.mxfp8 import BLOCK, rounded
from tests.fsdp.toys import EQUAL, LADDER, Sharded, at_rest, mesh_of, placements_on
from tests.ranks import RankPool

MIXED = MixedPrecision(compute=torch.bfloat16)


class Layer(nn.Module):
    """A residual block of two MXFP8 products, the first with a bias, and a norm."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Parameter(torch.randn(width, hidden) / 8)
        self.bias = nn.Parameter(torch.randn(width) / 8)
        self.down = nn.Parameter(torch.randn(hidden, width) / 8)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Same shape as ``hidden``."""
        wide = mxfp8_linear(self.norm(hidden), self.up, self.bias)
        return hidden + mxfp8_linear(torch.tanh(wide), self.down)


class Stack(nn.Module):
    """Layers of unlike widths, run plainly or computed again in backward."""

    def __init__(self, *, recompute: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(64, width) for width in (96, 32, 160))
        self.recompute = recompute

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Same shape as ``hidden``."""
        for layer in self.layers:
            if self.recompute:
                hidden = checkpoint(layer, hidden, use_reentrant=False)
            else:
                hidden = layer(hidden)
        return hidden


def _shard(
    shape: tuple[int, ...],
    levels: tuple,  # type: ignore[type-arg]
    *,
    quantized: bool,
    recompute: bool = False,
    declared: bool | None = None,
    transport: Transport = Transport.GLOO,
) -> Sharded:
    model, ledger, mesh = Stack(recompute=recompute), Ledger(transport), mesh_of(shape)
    placements = placements_on(mesh, *levels)
    with fully_shard_context("cpu", communicators=ledger.communicator) as context:
        for layer in cast(list[Layer], list(model.layers)):
            fully_shard(
                layer,
                mesh,
                placements,
                precision=MIXED,
                quantized=[layer.up, layer.down] if quantized else (),
                recomputed=recompute if declared is None else declared,
            )
        fully_shard(model, mesh, placements, precision=MIXED)
    return Sharded(model, context, ledger)


def _train(sharded: Sharded, *, microbatches: int = 1) -> list[torch.Tensor]:
    """Two steps of SGD; losses, and the rows held in the end."""
    optimizer = torch.optim.SGD(sharded.model.parameters(), lr=0.5)
    fully_shard_optimizer(optimizer)
    draw = torch.Generator().manual_seed(dist.get_rank())
    results = []
    for _ in range(2):
        sharded.ledger.clear()
        for index in range(microbatches):
            data = torch.randn(5, 64, generator=draw).bfloat16()
            with microbatch(sharded.context, is_last=index == microbatches - 1):
                loss = sharded.model(data).float().square().mean()
                loss.backward()
            results.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return results + [p.local.detach().clone() for p in sharded_parameters(sharded.model)]


def _gathered(sharded: Sharded) -> dict[torch.dtype, int]:
    """Bytes that the last step gathered, by format."""
    found = {torch.uint8: 0, torch.bfloat16: 0}
    for call in sharded.ledger.collectives:
        if call.operation == "all_gather":
            found[call.dtype] += call.nbytes
    return found


def _every_level(shapes: list[tuple[int, ...]], recompute: bool, transport: Transport) -> None:
    for shape in shapes:
        for levels in LADDER if len(shape) == 2 else EQUAL:
            if recompute and levels[1] is not Level.PARAMETERS:
                continue  # nothing travels in backward
            options = {"recompute": recompute, "transport": transport}
            plain = _shard(shape, levels, quantized=False, **options)  # type: ignore[arg-type]
            expected = _train(plain, microbatches=2)
            sharded = _shard(shape, levels, quantized=True, **options)  # type: ignore[arg-type]
            whole = _train(sharded, microbatches=2)
            assert transport is Transport.SHARED_MEMORY or at_rest(sharded.model)
            _assert_equal_rows(plain, expected, sharded, whole)


def _assert_equal_rows(
    plain: Sharded, expected: list[torch.Tensor], sharded: Sharded, found: list[torch.Tensor]
) -> None:
    """Equal losses, and equal bits of every row, wherever the two layouts put it."""
    num_losses = len(expected) - len(sharded_parameters(plain.model))
    assert torch.equal(torch.stack(expected[:num_losses]), torch.stack(found[:num_losses]))
    pairs = []
    for model, rows in ((plain.model, expected), (sharded.model, found)):
        own = {
            p.name: (p.row_start, held)
            for p, held in zip(sharded_parameters(model), rows[num_losses:], strict=True)
        }
        everyones: list[dict[str, tuple[int, torch.Tensor]]] = [{}] * dist.get_world_size()
        dist.all_gather_object(everyones, own)
        pairs.append(everyones)
    for name, parameter in Stack().named_parameters():
        both = []
        for everyones in pairs:
            value = torch.full(parameter.shape, torch.nan)
            for held in everyones:
                start, part = held[name]
                value[start : start + len(part)] = part
            both.append(value)
        assert not both[0].isnan().any()
        assert torch.equal(*both), name


CELLS = {1: [(1,)], 2: [(2,), (2, 1)], 4: [(4,), (2, 2)]}


@pytest.mark.parametrize("world_size", CELLS)
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_how_weights_travel_changes_no_bit(
    ranks: RankPool, world_size: int, recompute: bool
) -> None:
    ranks.run(world_size, _every_level, CELLS[world_size], recompute, Transport.GLOO)


def test_through_shared_memory(ranks: RankPool) -> None:
    ranks.run(2, _every_level, [(2,)], True, Transport.SHARED_MEMORY)


PAYLOAD = 2 * sum(64 * width for width in (96, 32, 160))
"""Elements of the matrices; on two ranks their layouts need no padding."""


def _count(level: int, recompute: bool) -> tuple[float, float]:
    """Bytes of matrices that a step gathers: per element, and to those of a run in bf16."""
    levels = EQUAL[level]
    plain = _shard((2,), levels, quantized=False, recompute=recompute)
    sharded = _shard((2,), levels, quantized=True, recompute=recompute)
    for each in (plain, sharded):
        _train(each, microbatches=2)
    found = _gathered(sharded)
    in_bf16 = _gathered(plain)[torch.bfloat16] - found[torch.bfloat16]
    return found[torch.uint8] / PAYLOAD, found[torch.uint8] / in_bf16


@pytest.mark.parametrize(
    ("level", "recompute", "planes", "most"),
    [
        (3, False, 4, 0.55),  # forward and backward of two microbatches
        (3, True, 6, 0.78),  # backward needs both
        (1, False, 2, 1.04),  # after the step, to where weights rest whole
    ],
)
def test_bytes_that_travel(
    ranks: RankPool, level: int, recompute: bool, planes: int, most: float
) -> None:
    for per_element, ratio in ranks.run(2, _count, level, recompute):
        assert per_element == planes * 33 / 32
        assert ratio <= most


def _forward_staging() -> tuple[int, int]:
    """Bytes of gathered planes and vectors at most, and at the end, of a forward alone."""
    sharded = _shard((2,), EQUAL[3], quantized=True)
    for _ in range(2):
        sharded.ledger.clear()
        with torch.no_grad():
            sharded.model(torch.ones(5, 64).bfloat16())
    return sharded.ledger.peak_staging_bytes, sharded.ledger.staging_bytes


def test_planes_are_let_go_as_soon_as_weights_are_decoded(ranks: RankPool) -> None:
    # The largest unit's is decoded before any comes beside it; two units' vectors stay.
    plane = 2 * 64 * 160 * 33 // 32
    vectors = 2 * 2 * (2 * 64 + 160) * 2
    for most, at_end in ranks.run(2, _forward_staging):
        assert at_end == 0
        assert plane <= most <= plane + vectors


def _lifetime() -> None:
    sharded = _shard((2,), EQUAL[3], quantized=True)
    _train(sharded)
    buffers = [
        weakref.ref(buffer.data.untyped_storage())
        for group in groups_of(sharded.model)
        for buffer in (group.weights.main, group.weights.whole)
    ]
    assert len(buffers) == 12 and all(buffer() is not None for buffer in buffers)
    del sharded
    assert all(buffer() is None for buffer in buffers)


def test_all_memory_goes_with_the_model(ranks: RankPool) -> None:
    ranks.run(2, _lifetime)


def _undeclared() -> None:
    sharded = _shard((2,), EQUAL[3], quantized=True, recompute=True, declared=False)
    loss = sharded.model(torch.ones(5, 64).bfloat16()).float().square().mean()
    with pytest.raises(WorkError, match=r"shard it with recomputed=True"):
        loss.backward()


def test_a_second_forward_is_declared(ranks: RankPool) -> None:
    ranks.run(2, _undeclared)


def _refused(layer: nn.Module, compute: torch.dtype | None = torch.bfloat16) -> ConfigError:
    mesh = mesh_of((1,))
    with pytest.raises(ConfigError) as caught, fully_shard_context("cpu"):
        fully_shard(
            layer,
            mesh,
            placements_on(mesh, *EQUAL[3]),
            precision=MixedPrecision(compute=compute),
            quantized=list(layer.parameters()),
        )
    return caught.value


def _refusals() -> None:
    error = _refused(nn.Linear(64, 33, bias=False))
    assert error.field == "weight" and error.value == (33, 64)
    assert "whole blocks of 32" in error.problem
    assert "whole blocks of 32" in _refused(nn.Linear(32, 32)).problem  # a vector
    assert "computed with in bf16" in _refused(nn.Linear(32, 32, bias=False), None).problem


def test_refusals(ranks: RankPool) -> None:
    ranks.run(1, _refusals)


def _matrix(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    draw = torch.Generator().manual_seed(rows + columns)
    numbers = torch.randn(rows, columns, generator=draw)
    return (numbers * torch.randint(-9, 9, (rows, columns), generator=draw).float().exp2()).to(
        dtype
    )


@pytest.mark.parametrize("plane", list(Plane))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_plane_stands_for_the_rounded_matrix(plane: Plane, dtype: torch.dtype) -> None:
    matrix = _matrix(96, 160, dtype)
    layout = plane_layout(GlobalLayout.build([matrix.shape], 1, block_rows=BLOCK), plane)
    held = torch.empty(layout.shapes[0], dtype=torch.uint8)
    encode(matrix, plane, held)
    assert held.numel() * 32 == matrix.numel() * 33
    result = torch.empty(96, 160, dtype=torch.bfloat16)
    decode(held, plane, result)
    assert torch.equal(result, rounded(matrix.bfloat16(), plane))


@settings(max_examples=30)
@given(
    blocks=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4)), min_size=1, max_size=4),
    num_ranks=st.integers(1, 7),
    plane=st.sampled_from(list(Plane)),
)
def test_quantizing_commutes_with_gathering(
    blocks: list[tuple[int, int]], num_ranks: int, plane: Plane
) -> None:
    matrices = [_matrix(32 * rows, 32 * columns, torch.float32) for rows, columns in blocks]
    layout = GlobalLayout.build([m.shape for m in matrices], num_ranks, block_rows=BLOCK)
    bytes_ = plane_layout(layout, plane)
    # Gathered, then quantized: every matrix whole.
    expected = torch.zeros(bytes_.size, dtype=torch.uint8)
    for index, matrix in enumerate(matrices):
        start, numel = bytes_.offsets[index], bytes_.shapes[index].numel()
        out = expected[start : start + numel].view(bytes_.shapes[index])
        encode(matrix, plane, out)
    # Quantized, then gathered: each rank the rows that it holds, which may be none.
    found = torch.zeros(bytes_.size, dtype=torch.uint8)
    for rank in range(num_ranks):
        begin, end = layout.run([True], [num_ranks], [rank])
        first, last = bytes_.run([True], [num_ranks], [rank])
        for index, matrix in enumerate(matrices):
            rows, wide = layout.rows(index, begin, end), bytes_.rows(index, first, last)
            shape = (wide.stop - wide.start, *bytes_.shapes[index][1:])
            out = found[first + wide.offset :][: math.prod(shape)].view(shape)
            encode(matrix[rows.start : rows.stop], plane, out)
    assert torch.equal(found, expected)
