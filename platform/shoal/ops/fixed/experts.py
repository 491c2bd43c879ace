"""The routed experts of a layer, for any number of rows per expert.

Rows go through three kernels, each of which reads the weights of the visited experts once:

    group    visits (token, choice) sorted by expert, tokens in order within each
    gate-up  a task: an expert and 32 columns of the intermediate; silu(gate) * up
    down     a task: 64 columns of the output; experts in increasing order, each output times the
             token's weight for it, added in fp32, rounded once at the end

What a token gets does not depend on the rows that visit its experts beside it, nor on how many
experts others visit. A product is rounded to the dtype of the rows where ``PackedLinear`` would
round it, so that the layer equals, bit for bit, its experts taken one by one as linear layers,
``swiglu`` between them, and the outputs added in increasing order of the expert.
"""

from __future__ import annotations

from typing import Any

import torch

from shoal.ops.fixed.arithmetic import broadcast
from shoal.ops.fixed.kernel import Kernel, kernel
from shoal.ops.fixed.lanes import device
from shoal.ops.fixed.linear import (
    PAIRS_PANEL,
    SINGLES_PANEL,
    clear,
    finish,
    input_rows,
    panel_sums,
    row_table,
    rows_at_once,
)
from shoal.ops.fixed.memory import (
    load_floats,
    read_float,
    read_int,
    rounded,
    store,
    store_floats,
    write_int,
)
from shoal.ops.fixed.panels import Kind, Panels, pack
from shoal.ops.fixed.swiglu import gated

_HALF_PANEL = 32
"""Gate columns of a panel; the other half are the up columns of the same numbers."""


class PackedExperts:
    """E gated MLPs, each token going through some of them."""

    def __init__(self, gate_up: Panels, down: Panels, num_experts: int) -> None:
        self.gate_up = gate_up
        self.down = down
        self.num_experts = num_experts

    @staticmethod
    def pack(
        gate_up: torch.Tensor, down: torch.Tensor, num_experts: int, *, kind: Kind
    ) -> PackedExperts:
        """Pack ``gate_up`` ``[E * 2I, H]``, gate rows of an expert before its up rows, and ``down``
        ``[E * H, I]``; both may be dropped afterwards."""
        return PackedExperts(
            pack(_interleaved(gate_up, num_experts), kind, count=num_experts),
            pack(down, kind, count=num_experts),
            num_experts,
        )

    @property
    def kind(self) -> Kind:
        """What the weights are kept in."""
        return self.down.kind

    def __call__(
        self, x: torch.Tensor, choices: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """``x`` ``[T, H]`` through the experts ``choices`` ``[T, k]`` int64 of each token.

        Choices increase along k; ``weights`` ``[T, k]`` fp32. Returns ``[T, H]`` like ``x``.
        """
        rows = input_rows(x, self.gate_up)
        choices, weights = choices.contiguous(), weights.contiguous()
        count, per_token = choices.shape
        visits = torch.empty(choices.numel(), dtype=torch.int64)
        # First visit of each expert and one past the last; then the visited experts, their number.
        starts = torch.empty(2 * self.num_experts + 2, dtype=torch.int64)
        _group(
            1,
            *(choices.data_ptr(), choices.numel(), self.num_experts),
            *(visits.data_ptr(), starts.data_ptr()),
        )
        hidden = self._gate_up(rows, x.dtype, visits, starts, per_token)
        return self._down(hidden, x, weights, visits, starts, per_token)

    def _gate_up(
        self,
        rows: torch.Tensor,
        dtype: torch.dtype,
        visits: torch.Tensor,
        starts: torch.Tensor,
        per_token: int,
    ) -> torch.Tensor:
        """The intermediate of each visit, in the order of experts: ``[T * k, I]``."""
        panels, inner = self.gate_up, self.down.inner
        hidden = torch.empty(visits.numel(), inner, dtype=dtype)
        visited = min(self.num_experts, visits.numel())
        _GATE_UP[panels.kind != "fp32"](
            visited * panels.per_weight,
            *(rows.data_ptr(), panels.row_bytes, *panels.addresses),
            *(panels.per_weight, panels.steps),
            *(self.num_experts, visits.data_ptr(), starts.data_ptr(), per_token),
            *(hidden.data_ptr(), inner, hidden.element_size()),
        )
        return hidden

    def _down(
        self,
        hidden: torch.Tensor,
        x: torch.Tensor,
        weights: torch.Tensor,
        visits: torch.Tensor,
        starts: torch.Tensor,
        per_token: int,
    ) -> torch.Tensor:
        panels = self.down
        rows = input_rows(hidden, panels)
        out = torch.empty(x.shape, dtype=x.dtype)
        sums = torch.empty(panels.per_weight * x.shape[0] * 64, dtype=torch.float32)
        _DOWN[panels.kind != "fp32"](
            panels.per_weight,
            *(rows.data_ptr(), panels.row_bytes, *panels.addresses),
            *(panels.per_weight, panels.steps),
            *(self.num_experts, visits.data_ptr(), starts.data_ptr(), per_token),
            *(weights.data_ptr(), x.shape[0], sums.data_ptr(), panels.columns),
            *(out.data_ptr(), out.element_size()),
        )
        return out


def _interleaved(gate_up: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Rows so that each panel has 32 gate columns and the up columns that belong to them."""
    width = gate_up.shape[0] // num_experts // 2
    split: torch.Tensor = gate_up.view(num_experts, 2, width, -1)
    split = torch.nn.functional.pad(split, (0, 0, 0, -width % _HALF_PANEL))
    split = split.unflatten(2, (-1, _HALF_PANEL)).transpose(1, 2)
    return split.reshape(-1, gate_up.shape[1])


@kernel(5, "experts_group")
def _group(task: Any, thread: Any, a: Any) -> None:
    """Sort visits by expert, keeping their order within each."""
    choices, count, experts, visits, starts = a[0], a[1], a[2], a[3], a[4]
    visited = starts + (experts + 1) * 8
    for expert in range(experts + 1):
        write_int(starts + expert * 8, 0)
    for visit in range(count):
        place = starts + read_int(choices + visit * 8) * 8 + 8
        write_int(place, read_int(place) + 1)
    number = 0
    for expert in range(experts):
        here = read_int(starts + expert * 8)
        if read_int(starts + expert * 8 + 8):
            write_int(visited + number * 8, expert)
            number += 1
        write_int(starts + expert * 8 + 8, here + read_int(starts + expert * 8 + 8))
    write_int(visited + experts * 8, number)
    # Filling an expert's place moves its start to the next expert's; then all are moved back.
    for visit in range(count):
        place = starts + read_int(choices + visit * 8) * 8
        write_int(visits + read_int(place) * 8, visit)
        write_int(place, read_int(place) + 1)
    for expert in range(experts, 0, -1):
        write_int(starts + expert * 8, read_int(starts + expert * 8 - 8))
    write_int(starts, 0)


def _gate_up(product: Any, name: str) -> Kernel:
    """A task is a visited expert and a panel of 32 gate and 32 up columns."""

    @device
    def activate(sums: Any, columns: Any, size: Any, out: Any) -> None:
        """Up to 32 numbers of the intermediate from a row of gate and up sums."""
        for column in range(0, min(columns, 32), 16):
            gate, up = load_floats(sums + column * 4), load_floats(sums + column * 4 + 128)
            value = gated(rounded(gate, size), rounded(up, size))
            store(out + column * size, value, min(columns - column, 16), size)

    @kernel(14, name)
    def body(task: Any, thread: Any, a: Any) -> None:
        rows, row_bytes, data, scales, small, panels, steps = (
            *(a[0], a[1], a[2], a[3], a[4], a[5], a[6]),
        )
        experts, visits, starts, per_token, hidden, width, size = (
            *(a[7], a[8], a[9], a[10], a[11], a[12], a[13]),
        )
        visited = starts + (experts + 1) * 8
        if task // panels >= read_int(visited + experts * 8):
            return
        expert, panel = read_int(visited + task // panels * 8), task % panels
        table, sums, batch = row_table(), panel_sums(), rows_at_once(scales)
        stop = read_int(starts + expert * 8 + 8)
        for start in range(read_int(starts + expert * 8), stop, batch):
            here = min(stop - start, batch)
            for row in range(here):
                token = read_int(visits + (start + row) * 8) // per_token
                write_int(table + row * 8, rows + token * row_bytes)
            product(table, here, data, scales, small, expert * panels + panel, steps, sums)
            for row in range(here):
                target = hidden + ((start + row) * width + panel * 32) * size
                activate(sums + row * 256, width - panel * 32, size, target)

    return body


@device
def _add_weighted(sums: Any, weight: Any, size: Any, totals: Any) -> None:
    """Add a row of 64 outputs times ``weight`` to its token's totals."""
    for place in range(0, 256, 64):
        value = rounded(load_floats(sums + place), size) * broadcast(weight)
        store_floats(totals + place, load_floats(totals + place) + value)


def _down(product: Any, name: str) -> Kernel:
    """A task is a panel of 64 output columns, of all experts."""

    @kernel(17, name)
    def body(task: Any, thread: Any, a: Any) -> None:
        rows, row_bytes, data, scales, small, panels, steps = (
            *(a[0], a[1], a[2], a[3], a[4], a[5], a[6]),
        )
        experts, visits, starts, per_token, weights, count, totals, columns, out, size = (
            *(a[7], a[8], a[9], a[10], a[11], a[12], a[13], a[14], a[15], a[16]),
        )
        visited = starts + (experts + 1) * 8
        table, sums, batch = row_table(), panel_sums(), rows_at_once(scales)
        totals += task * count * 256
        clear(totals, count)
        for index in range(read_int(visited + experts * 8)):
            expert = read_int(visited + index * 8)
            stop = read_int(starts + expert * 8 + 8)
            for start in range(read_int(starts + expert * 8), stop, batch):
                here = min(stop - start, batch)
                for row in range(here):
                    write_int(table + row * 8, rows + (start + row) * row_bytes)
                product(table, here, data, scales, small, expert * panels + task, steps, sums)
                for row in range(here):
                    visit = read_int(visits + (start + row) * 8)
                    target = totals + visit // per_token * 256
                    _add_weighted(sums + row * 256, read_float(weights + visit * 4), size, target)
        for row in range(count):
            target = out + (row * columns + task * 64) * size
            finish(totals + row * 256, columns - task * 64, 0, target, size)

    return body


_GATE_UP = {
    False: _gate_up(SINGLES_PANEL, "experts_gate_up_fp32"),
    True: _gate_up(PAIRS_PANEL, "experts_gate_up_bf16"),
}
_DOWN = {
    False: _down(SINGLES_PANEL, "experts_down_fp32"),
    True: _down(PAIRS_PANEL, "experts_down_bf16"),
}
