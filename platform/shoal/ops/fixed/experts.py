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

from shoal.ops.fixed import mxfp8
from shoal.ops.fixed.kernel import Kernel, kernel
from shoal.ops.fixed.lanes import (
    broadcast,
    device,
    load_floats,
    read_float,
    read_int,
    rounded,
    stack,
    store,
    store_floats,
    write_int,
)
from shoal.ops.fixed.linear import PAIRS, SINGLES, decoding_scratch, input_rows, panel_columns
from shoal.ops.fixed.panels import Kind, Panels, pack
from shoal.ops.fixed.swiglu import gated

_HALF_PANEL = 32
"""Gate columns of a panel; the other half are the up columns of the same numbers."""

# Of a thread: addresses of rows and columns, and the sums of 6 rows of 64 columns.
_tables = stack(2)
_sums = stack(24)


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
        scratch = decoding_scratch(panels)
        _GATE_UP[panels.kind != "fp32"](
            visited * panels.per_weight,
            *(rows.data_ptr(), rows.stride(0) * rows.element_size(), *_addresses(panels)),
            *(self.num_experts, visits.data_ptr(), starts.data_ptr(), per_token),
            *(hidden.data_ptr(), inner, hidden.element_size(), scratch.data_ptr()),
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
        rows, scratch = input_rows(hidden, panels), decoding_scratch(panels)
        out = torch.empty(x.shape, dtype=x.dtype)
        sums = torch.empty(panels.per_weight * x.shape[0] * 64, dtype=torch.float32)
        _DOWN[panels.kind != "fp32"](
            panels.per_weight,
            *(rows.data_ptr(), rows.stride(0) * rows.element_size(), *_addresses(panels)),
            *(self.num_experts, visits.data_ptr(), starts.data_ptr(), per_token),
            *(weights.data_ptr(), x.shape[0], sums.data_ptr(), panels.columns),
            *(out.data_ptr(), out.element_size(), scratch.data_ptr()),
        )
        return out


def _interleaved(gate_up: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Rows so that each panel has 32 gate columns and the up columns that belong to them."""
    width = gate_up.shape[0] // num_experts // 2
    split: torch.Tensor = gate_up.view(num_experts, 2, width, -1)
    split = torch.nn.functional.pad(split, (0, 0, 0, -width % _HALF_PANEL))
    split = split.unflatten(2, (-1, _HALF_PANEL)).transpose(1, 2)
    return split.reshape(-1, gate_up.shape[1])


def _addresses(panels: Panels) -> tuple[int, int, int, int]:
    scales = 0 if panels.scales is None else panels.scales.data_ptr()
    return panels.data.data_ptr(), scales, panels.per_weight, panels.steps


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


@device
def _panel(data: Any, scales: Any, number: Any, steps: Any, decoded: Any) -> Any:
    """The address of a panel, MXFP8 being decoded to ``decoded`` first."""
    if not scales:
        return data + number * steps * 256
    mxfp8.decode_panel(data + number * steps * 128, scales + number * steps * 4, steps, decoded)
    return decoded


@device
def _clear(sums: Any, count: Any) -> None:
    """Zero ``count`` rows of 64 sums."""
    for place in range(0, count * 256, 64):
        store_floats(sums + place, broadcast(0.0))


def _gate_up(multiply: Any, kind: Kind) -> Kernel:
    """A task is a visited expert and a panel of 32 gate and 32 up columns."""

    @kernel(14, f"experts_gate_up_{kind}")
    def body(task: Any, thread: Any, a: Any) -> None:
        rows, stride, data, scales, panels, steps, experts, visits, starts, per_token = (
            *(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9]),
        )
        hidden, width, size = a[10], a[11], a[12]
        visited = starts + (experts + 1) * 8
        if task // panels >= read_int(visited + experts * 8):
            return
        expert, panel = read_int(visited + task // panels * 8), task % panels
        decoded = a[13] + thread * steps * 256
        table, sums = _tables(), _sums()
        number = expert * panels + panel
        panel_columns(table + 64, _panel(data, scales, number, steps, decoded))
        stop = read_int(starts + expert * 8 + 8)
        for start in range(read_int(starts + expert * 8), stop, 6):
            here = min(stop - start, 6)
            _clear(sums, here)
            for row in range(here):
                token = read_int(visits + (start + row) * 8) // per_token
                write_int(table + row * 8, rows + token * stride)
            multiply(table, here, table + 64, steps, 256, sums, 256)
            for row in range(here):
                for column in range(panel * 32, min(panel * 32 + 32, width), 16):
                    place = sums + row * 256 + (column - panel * 32) * 4
                    gate, up = load_floats(place), load_floats(place + 128)
                    value = gated(rounded(gate, size), rounded(up, size))
                    target = hidden + ((start + row) * width + column) * size
                    store(target, value, min(width - column, 16), size)

    return body


def _down(multiply: Any, kind: Kind) -> Kernel:
    """A task is a panel of 64 output columns, of all experts."""

    @device
    def add_expert(
        rows: Any,
        stride: Any,
        start: Any,
        stop: Any,
        panel: Any,
        steps: Any,
        visits: Any,
        per_token: Any,
        weights: Any,
        totals: Any,
        size: Any,
    ) -> None:
        """Add an expert's weighted outputs for its visits to the totals of their tokens."""
        table, sums = _tables(), _sums()
        panel_columns(table + 64, panel)
        for first in range(start, stop, 6):
            here = min(stop - first, 6)
            _clear(sums, here)
            for row in range(here):
                write_int(table + row * 8, rows + (first + row) * stride)
            multiply(table, here, table + 64, steps, 256, sums, 256)
            for row in range(here):
                visit = read_int(visits + (first + row) * 8)
                weight = broadcast(read_float(weights + visit * 4))
                target = totals + visit // per_token * 256
                for place in range(0, 256, 64):
                    value = rounded(load_floats(sums + row * 256 + place), size) * weight
                    store_floats(target + place, load_floats(target + place) + value)

    @kernel(17, f"experts_down_{kind}")
    def body(task: Any, thread: Any, a: Any) -> None:
        rows, stride, data, scales, panels, steps, experts, visits, starts, per_token = (
            *(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9]),
        )
        weights, count, columns, out, size = a[10], a[11], a[13], a[14], a[15]
        totals = a[12] + task * count * 256
        visited = starts + (experts + 1) * 8
        _clear(totals, count)
        for index in range(read_int(visited + experts * 8)):
            expert = read_int(visited + index * 8)
            number = expert * panels + task
            panel = _panel(data, scales, number, steps, a[16] + thread * steps * 256)
            start, stop = read_int(starts + expert * 8), read_int(starts + expert * 8 + 8)
            add_expert(
                rows,
                stride,
                start,
                stop,
                panel,
                steps,
                visits,
                per_token,
                weights,
                totals,
                size,
            )
        for row in range(count):
            for column in range(task * 64, min(task * 64 + 64, columns), 16):
                value = load_floats(totals + row * 256 + (column - task * 64) * 4)
                target = out + (row * columns + column) * size
                store(target, value, min(columns - column, 16), size)

    return body


_GATE_UP = {False: _gate_up(SINGLES, "fp32"), True: _gate_up(PAIRS, "bf16")}
_DOWN = {False: _down(SINGLES, "fp32"), True: _down(PAIRS, "bf16")}
