"""Linear layers of which an output row depends on its input row and the weight alone."""

from __future__ import annotations

from typing import Any

import torch

from shoal.errors import ConfigError
from shoal.ops.fixed import mxfp8, tiles
from shoal.ops.fixed.arithmetic import broadcast
from shoal.ops.fixed.kernel import Kernel, kernel
from shoal.ops.fixed.lanes import device
from shoal.ops.fixed.memory import (
    load,
    load_floats,
    read_int,
    stack,
    store,
    store_floats,
    write_int,
)
from shoal.ops.fixed.panels import Kind, Panels, pack

_SINGLES = tiles.column_product(4, pairs=False, apart=False)
_PAIRS = tiles.column_product(4, pairs=True, apart=False)

ROW_TASK = 96
"""Fewest rows that are worth a task of their own, where panels alone make too few tasks."""

# Of a thread: addresses of up to 96 rows, their sums of a panel, and 64 decoded steps of MXFP8.
row_table = stack(12)
panel_sums = stack(96 * 4)
_decoded = stack(64 * 4)


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
        _KERNELS[panels.kind != "fp32"](
            chunks * per_weight,
            *(rows.data_ptr(), panels.row_bytes, count, -(-count // chunks)),
            *(*panels.addresses, per_weight, panels.steps, panels.columns),
            0 if self.bias is None else self.bias.data_ptr(),
            *(out.data_ptr(), out.element_size()),
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
    return x.contiguous()


@device
def clear(sums: Any, count: Any) -> None:
    """Zero ``count`` rows of 64 sums."""
    for place in range(0, count * 256, 64):
        store_floats(sums + place, broadcast(0.0))


@device
def rows_at_once(scales: Any) -> Any:
    """Rows that are worth taking through a panel together: of MXFP8 many, as it is decoded."""
    return 96 if scales else tiles.WHOLE_ROWS


def _panel_product(multiply: Any, decodes: bool) -> Any:
    """A kernel function: rows times panel ``number``, to ``sums`` ``[rows, 64]``.

    ``rows`` is a table of the addresses of ``count`` rows, at most ``rows_at_once``.
    """

    @device
    def plain(rows: Any, count: Any, panel: Any, steps: Any, sums: Any) -> None:
        clear(sums, count)
        multiply(rows, count, panel, steps, sums)

    @device
    def product(
        rows: Any,
        count: Any,
        data: Any,
        scales: Any,
        small: Any,
        number: Any,
        steps: Any,
        sums: Any,
    ) -> None:
        plain(rows, count, data + number * steps * 256, steps, sums)

    @device
    def decoding_product(
        rows: Any,
        count: Any,
        data: Any,
        scales: Any,
        small: Any,
        number: Any,
        steps: Any,
        sums: Any,
    ) -> None:
        if not scales:
            plain(rows, count, data + number * steps * 256, steps, sums)
            return
        first, decoded = number * steps, _decoded()
        clear(sums, count)
        # 64 steps at a time, so that what is decoded is still in the nearest cache when used.
        for step in range(0, steps, 64):
            here, place = min(steps - step, 64), first + step
            mxfp8.decode_panel(
                data + place * 128, scales + place * 4, small + place // 16, here, decoded
            )
            multiply(rows, count, decoded, here, sums)
            for row in range(0, count * 8, 8):
                write_int(rows + row, read_int(rows + row) + here * 4)

    return decoding_product if decodes else product


SINGLES_PANEL = _panel_product(_SINGLES, decodes=False)
PAIRS_PANEL = _panel_product(_PAIRS, decodes=True)


@device
def finish(sums: Any, columns: Any, bias: Any, out: Any, size: Any) -> None:
    """Store up to 64 sums of a row with the bias added, bf16 if ``size`` is 2, else fp32."""
    for vector in range(0, min(columns, 64), 16):
        count = min(columns - vector, 16)
        value = load_floats(sums + 4 * vector)
        if bias:
            value = value + load(bias + 4 * vector, count, 4)
        store(out + size * vector, value, count, size)


def _linear(product: Any, name: str) -> Kernel:
    """The kernel of ``PackedLinear``: a task is a panel and a chunk of rows."""

    @kernel(13, name)
    def body(task: Any, thread: Any, a: Any) -> None:
        x, row_bytes, count, per_chunk, data, scales, small = (
            *(a[0], a[1], a[2], a[3], a[4], a[5], a[6]),
        )
        panels, steps, columns, bias, out, size = a[7], a[8], a[9], a[10], a[11], a[12]
        chunk, number = task // panels, task % panels
        table, sums, batch = row_table(), panel_sums(), rows_at_once(scales)
        bias = bias + number * 256 if bias else 0
        stop = min((chunk + 1) * per_chunk, count)
        for start in range(chunk * per_chunk, stop, batch):
            here = min(stop - start, batch)
            for row in range(here):
                write_int(table + 8 * row, x + (start + row) * row_bytes)
            product(table, here, data, scales, small, number, steps, sums)
            for row in range(here):
                target = out + ((start + row) * columns + number * 64) * size
                finish(sums + 256 * row, columns - number * 64, bias, target, size)

    return body


_KERNELS = {False: _linear(SINGLES_PANEL, "linear_fp32"), True: _linear(PAIRS_PANEL, "linear_bf16")}
