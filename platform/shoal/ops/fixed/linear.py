"""Linear layers of which an output row depends on its input row and the weight alone."""

from __future__ import annotations

from typing import Any

import torch

from shoal.errors import ConfigError
from shoal.ops.fixed import mxfp8, tiles
from shoal.ops.fixed.kernel import Kernel, kernel
from shoal.ops.fixed.lanes import (
    broadcast,
    device,
    load,
    load_floats,
    stack,
    store,
    store_floats,
    write_int,
)
from shoal.ops.fixed.panels import Kind, Panels, pack

SINGLES = tiles.column_product(4, pairs=False)
PAIRS = tiles.column_product(4, pairs=True)

ROW_TASK = 96
"""Fewest rows that are worth a task of their own, where panels alone make too few tasks."""

# Of a thread: addresses of rows and columns, and the sums of 6 rows of 64 columns.
_tables = stack(2)
_sums = stack(24)


class PackedLinear:
    """``x @ weight.T + bias`` with the weight packed once.

    ``kind`` fp32: fp32 rows. bf16: bf16 rows, fp32 sums, the bias added before the one rounding.
    mxfp8: bf16 or fp32 rows, which are quantized like the weight, in blocks of 32 along K.
    """

    def __init__(self, panels: Panels, bias: torch.Tensor | None) -> None:
        self.panels = panels
        self.bias = bias

    @staticmethod
    def pack(weight: torch.Tensor, bias: torch.Tensor | None = None, *, kind: Kind) -> PackedLinear:
        """Pack ``weight`` ``[N, K]`` and ``bias`` ``[N]``; both may be dropped afterwards."""
        if bias is not None:
            bias = bias.detach().to(torch.float32, copy=True).contiguous()
        return PackedLinear(pack(weight, kind), bias)

    @property
    def kind(self) -> Kind:
        """What the weight is kept in."""
        return self.panels.kind

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        return self.panels.columns, self.panels.inner

    def __call__(self, x: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """``x`` ``[T, K]`` to ``[T, N]``, in ``dtype`` (bf16 or fp32), by default that of ``x``."""
        panels = self.panels
        rows = input_rows(x, panels)
        out = x.new_empty(x.shape[0], panels.columns, dtype=dtype or x.dtype)
        per_weight, count = panels.per_weight, rows.shape[0]
        chunks = max(1, min(count // ROW_TASK, -(-4 * torch.get_num_threads() // per_weight)))
        per_chunk = -(-count // chunks)
        arguments = [
            *(rows.data_ptr(), rows.stride(0) * rows.element_size(), count, per_chunk),
            *(panels.data.data_ptr(), per_weight, panels.steps, panels.columns),
            0 if self.bias is None else self.bias.data_ptr(),
            *(out.data_ptr(), out.element_size()),
        ]
        if panels.scales is None:
            _KERNELS[panels.kind](chunks * per_weight, *arguments)
        else:
            scratch = decoding_scratch(panels)
            _linear_mxfp8(
                chunks * per_weight, *arguments, panels.scales.data_ptr(), scratch.data_ptr()
            )
        return out


def input_rows(x: torch.Tensor, panels: Panels) -> torch.Tensor:
    """``x`` ``[T, K]`` as the tiles read it: in the panels' dtype, contiguous and even in K."""
    if x.dim() != 2 or x.shape[1] != panels.inner:
        raise ValueError(f"the weight takes rows of {panels.inner}, not {tuple(x.shape)}")
    if panels.kind == "mxfp8":
        return mxfp8.quantize_rows(x)
    expected = torch.float32 if panels.kind == "fp32" else torch.bfloat16
    if x.dtype != expected:
        raise ConfigError(
            "precision", str(x.dtype), f"{panels.kind} weights take {expected} rows", "Convert them"
        )
    if x.shape[1] % 2 and panels.kind == "bf16":
        return torch.nn.functional.pad(x, (0, 1))
    return x if x.stride(1) == 1 else x.contiguous()


def decoding_scratch(panels: Panels) -> torch.Tensor:
    """Room for each thread to decode one MXFP8 panel into; none for other kinds."""
    size = torch.get_num_threads() * panels.steps * 4 * 64 if panels.kind == "mxfp8" else 0
    return torch.empty(size, dtype=torch.uint8)


@device
def panel_columns(table: Any, panel: Any) -> None:
    """Write the addresses of the 4 vectors of a panel's first step."""
    for vector in range(4):
        write_int(table + 8 * vector, panel + 64 * vector)


@device
def finish(sums: Any, columns: Any, bias: Any, out: Any, size: Any) -> None:
    """Store up to 64 sums of a row with the bias added, bf16 if ``size`` is 2, else fp32."""
    for vector in range(0, min(columns, 64), 16):
        count = min(columns - vector, 16)
        value = load_floats(sums + 4 * vector)
        if bias:
            value = value + load(bias + 4 * vector, count, 4)
        store(out + size * vector, value, count, size)


def _panel_of(multiply: Any) -> Any:
    """A kernel function that takes rows through one panel."""

    @device
    def run(
        rows: Any,
        stride: Any,
        count: Any,
        panel: Any,
        steps: Any,
        columns: Any,
        bias: Any,
        out: Any,
        out_stride: Any,
        size: Any,
    ) -> None:
        table, sums = _tables(), _sums()
        panel_columns(table + 64, panel)
        for start in range(0, count, 6):
            here = min(count - start, 6)
            for row in range(here):
                write_int(table + 8 * row, rows + (start + row) * stride)
                for vector in range(4):
                    store_floats(sums + 256 * row + 64 * vector, broadcast(0.0))
            multiply(table, here, table + 64, steps, 256, sums, 256)
            for row in range(here):
                finish(sums + 256 * row, columns, bias, out + (start + row) * out_stride, size)

    return run


_singles_panel = _panel_of(SINGLES)
_pairs_panel = _panel_of(PAIRS)


def _linear(run: Any, name: str) -> Kernel:
    """The kernel of ``PackedLinear``: a task is a panel and a chunk of rows."""

    @kernel(11, name)
    def body(task: Any, thread: Any, a: Any) -> None:
        rows, stride, count, per_chunk, data, panels, steps, columns, bias, out, size = (
            *(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10]),
        )
        chunk, panel = task // panels, task % panels
        start = chunk * per_chunk
        run(
            rows + start * stride,
            stride,
            min(per_chunk, count - start),
            data + panel * steps * 256,
            steps,
            columns - panel * 64,
            bias + panel * 256 if bias else 0,
            out + (start * columns + panel * 64) * size,
            columns * size,
            size,
        )

    return body


_KERNELS = {
    "fp32": _linear(_singles_panel, "linear_fp32"),
    "bf16": _linear(_pairs_panel, "linear_bf16"),
}


@kernel(13, "linear_mxfp8")
def _linear_mxfp8(task: Any, thread: Any, a: Any) -> None:
    rows, stride, count, per_chunk, data, panels, steps, columns, bias, out, size = (
        *(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10]),
    )
    chunk, panel = task // panels, task % panels
    start = chunk * per_chunk
    decoded = a[12] + thread * steps * 256
    mxfp8.decode_panel(data + panel * steps * 128, a[11] + panel * steps * 4, steps, decoded)
    _pairs_panel(
        rows + start * stride,
        stride,
        min(per_chunk, count - start),
        decoded,
        steps,
        columns - panel * 64,
        bias + panel * 256 if bias else 0,
        out + (start * columns + panel * 64) * size,
        columns * size,
        size,
    )
