"""MXFP8 in the kernels of fixed order; the format is that of ``shoal.ops.mxfp8``.

Products are emulated exactly: after quantization of weights and activations the bf16 tiles compute
what the format's own arithmetic would, exact products summed in fp32. Weights that the format
cannot hold are refused; an activation like that makes its whole block not a number.
"""

from __future__ import annotations

from typing import Any

import torch
from llvmlite import ir
from numba.core import types

from shoal.errors import ConfigError
from shoal.ops.fixed.arithmetic import tree
from shoal.ops.fixed.kernel import kernel
from shoal.ops.fixed.lanes import (
    FLOATS,
    I32,
    WIDTH,
    WORDS,
    address,
    device,
    lanes,
    operation,
    pointer,
    splat,
    words,
)
from shoal.ops.fixed.memory import load, read_byte, store_halves
from shoal.ops.mxfp8 import BLOCK, LEAST, LIMIT, MOST, quantize

_BYTE = ir.IntType(8)
_HALVES = ir.VectorType(ir.IntType(16), WIDTH)
_PAIRS = ir.VectorType(ir.IntType(16), 2 * WIDTH)


def quantize_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``quantize`` along the last dimension, K, a multiple of 32.

    ``[..., K]`` floating point to E4M3 ``[..., K]`` (float8_e4m3fn) and biased exponents of the
    scales ``[..., K / 32]`` (uint8, E8M0). Raises ``ConfigError`` for numbers it cannot hold, of
    which the meta device has none.
    """
    if weight.is_meta:
        return quantize(weight)
    magnitudes = weight.detach().float().abs()
    if not bool((magnitudes <= LIMIT).all()):
        raise ConfigError(
            "weight",
            float(magnitudes.max()),
            "MXFP8 holds finite numbers up to 3e38 only",
            "Serve these weights in bf16 or fp32",
        )
    return quantize(weight)


def quantize_rows(rows: torch.Tensor) -> torch.Tensor:
    """Quantize activations ``[T, K]``, bf16 or fp32, and give them back as bf16 ``[T, K']``.

    K' is K rounded up to a multiple of 32, with zeros past K. What is returned is what E4M3 and
    the scales stand for, exactly.
    """
    rows = rows.contiguous()
    count, inner = rows.shape
    padded = inner + -inner % BLOCK
    out = rows.new_empty(count, padded, dtype=torch.bfloat16)
    per_task = max(1, 32768 // padded)
    _quantize_rows(
        -(-count // per_task),
        *(rows.data_ptr(), count, inner, rows.element_size(), out.data_ptr(), per_task),
    )
    return out


@operation(lanes, lanes)
def _rounded(b: Any, value: Any) -> Any:
    """Numbers of at most 448 to the nearest of E4M3, ties to even.

    Adding and taking away 1.5 * 2**23 times the spacing of E4M3 at a number rounds it to that
    spacing, which is 2**-9 up to 2**-6 and an eighth of the power of two below it from there.
    """
    bits = b.bitcast(value, WORDS)
    exponent = b.and_(bits, words(0x7F800000))
    floor = words((127 - 6) << 23)
    exponent = b.select(b.icmp_signed(">", exponent, floor), exponent, floor)
    shifter = b.bitcast(b.add(exponent, words((20 << 23) | 0x400000)), FLOATS)
    sign = b.and_(bits, words(-(1 << 31)))
    plain = b.bitcast(b.and_(bits, words(0x7FFFFFFF)), FLOATS)
    result = b.bitcast(b.fsub(b.fadd(plain, shifter), shifter), WORDS)
    return b.bitcast(b.or_(result, sign), FLOATS)


@operation(lanes, lanes, lanes)
def _scale(b: Any, first: Any, second: Any) -> Any:
    """The scale of a block of 32 in every lane; no number if one of them is none or too large."""
    most = words(0)
    for half in (first, second):
        plain = b.and_(b.bitcast(half, WORDS), words(0x7FFFFFFF))
        most = b.select(b.icmp_signed(">", plain, most), plain, most)
    most = tree(b, most, lambda x, y: b.select(b.icmp_signed(">", x, y), x, y))
    above = b.icmp_signed(">", b.and_(most, I32(0x7FFFFF)), I32(0x600000))
    exponent = b.add(b.sub(b.lshr(most, I32(23)), I32(8)), b.zext(above, I32))
    exponent = b.select(b.icmp_signed("<", exponent, I32(LEAST)), I32(LEAST), exponent)
    bits = b.select(
        b.icmp_signed("<=", exponent, I32(MOST)), b.shl(exponent, I32(23)), I32(0x7FC00000)
    )
    return b.bitcast(splat(b, bits, WORDS), FLOATS)


@kernel(6, "mxfp8_quantize_rows")
def _quantize_rows(task: Any, thread: Any, arguments: Any) -> None:
    source, count, inner, size, out, per_task = (
        arguments[0],
        arguments[1],
        arguments[2],
        arguments[3],
        arguments[4],
        arguments[5],
    )
    padded = (inner + 31) // 32 * 32
    for row in range(task * per_task, min(count, (task + 1) * per_task)):
        for start in range(0, padded, 32):
            place = source + (row * inner + start) * size
            first = load(place, min(inner - start, 16), size)
            second = load(place + 16 * size, max(min(inner - start - 16, 16), 0), size)
            scale = _scale(first, second)
            target = out + (row * padded + start) * 2
            store_halves(target, _rounded(first / scale) * scale)
            store_halves(target + 32, _rounded(second / scale) * scale)


@operation(types.void, address, lanes, address)
def _decode(b: Any, source: Any, scale: Any, out: Any) -> None:
    """16 pairs of E4M3 at ``source`` times the scale of each, as 16 pairs of bf16 at ``out``."""
    pairs = b.load(pointer(b, source, _HALVES), align=2)
    pairs = b.zext(pairs, WORDS)
    first = b.lshr(_decoded(b, b.shl(pairs, words(24)), scale), words(16))
    second = b.and_(_decoded(b, b.shl(pairs, words(16)), scale), words(-65536))
    b.store(b.or_(first, second), pointer(b, out, WORDS), align=4)


def _decoded(b: Any, shifted: Any, scale: Any) -> Any:
    """Bits of the fp32 numbers whose E4M3 are the highest 8 bits of the words ``shifted``.

    E4M3's exponent and fraction, put in place of fp32's, are the number times 2**-120, subnormal
    numbers too.
    """
    sign = b.and_(shifted, words(-(1 << 31)))
    bits = b.lshr(b.and_(shifted, words(0x7F000000)), words(4))
    number = b.fmul(b.bitcast(b.or_(sign, bits), FLOATS), ir.Constant(FLOATS, [2.0**120] * WIDTH))
    return b.bitcast(b.fmul(number, scale), WORDS)


@operation(types.void, address, lanes, address)
def _decode_normal(b: Any, source: Any, added: Any, out: Any) -> None:
    """As above for numbers that are neither zero nor subnormal, by integer operations alone.

    ``added`` is what makes of the exponent in E4M3 that in bf16 after scaling.
    """
    source = b.load(pointer(b, source, ir.VectorType(_BYTE, 2 * WIDTH)), align=2)
    halves = b.zext(source, _PAIRS)
    sign = b.and_(b.shl(halves, _each(8)), _each(-(1 << 15)))
    rest = b.and_(b.shl(halves, _each(4)), _each(0x7F0))
    result = b.or_(sign, b.add(rest, b.bitcast(added, _PAIRS)))
    b.store(result, pointer(b, out, _PAIRS), align=4)


def _each(value: int) -> Any:
    return ir.Constant(_PAIRS, [value] * 2 * WIDTH)


@operation(lanes, address)
def _scales(b: Any, where: Any) -> Any:
    """16 scales from their biased exponents."""
    exponents = b.load(pointer(b, where, ir.VectorType(_BYTE, WIDTH)), align=1)
    return b.bitcast(b.shl(b.zext(exponents, WORDS), words(23)), FLOATS)


@operation(lanes, address)
def _exponents_added(b: Any, where: Any) -> Any:
    """What ``_decode_normal`` adds for 16 scales: to E4M3's bias 7 belongs a scale of 2**0."""
    exponents = b.load(pointer(b, where, ir.VectorType(_BYTE, WIDTH)), align=1)
    added = b.shl(b.sub(b.zext(exponents, WORDS), words(7)), words(7))
    return b.bitcast(b.or_(added, b.shl(added, words(16))), FLOATS)


@device
def decode_panel(data: Any, scales: Any, small: Any, steps: Any, out: Any) -> None:
    """A panel of MXFP8 to a panel of bf16: 64 columns, ``steps`` pairs, a scale per 16 pairs.

    ``small`` points to a byte per 16 steps: whether a number of them is zero or subnormal.
    """
    for block in range(0, steps, 16):
        place, start, stop = scales + block * 4, block * 64, block * 64 + 1024
        if read_byte(small + block // 16):
            for column in range(0, 64, 16):
                scale = _scales(place + column)
                for step in range(start + column, stop, 64):
                    _decode(data + step * 2, scale, out + step * 4)
        else:
            first, second = _exponents_added(place), _exponents_added(place + 16)
            third, fourth = _exponents_added(place + 32), _exponents_added(place + 48)
            for step in range(start, stop, 64):
                _decode_normal(data + step * 2, first, out + step * 4)
                _decode_normal(data + step * 2 + 32, second, out + step * 4 + 64)
                _decode_normal(data + step * 2 + 64, third, out + step * 4 + 128)
                _decode_normal(data + step * 2 + 96, fourth, out + step * 4 + 192)


def has_small(values: torch.Tensor) -> torch.Tensor:
    """Whether E4M3 codes ``[panels, steps, 64, 2]`` uint8 have zeros or subnormal numbers.

    uint8 ``[panels, steps / 16]``, for ``decode_panel``.
    """
    small = (values & 0x7F) < 8
    blocks: torch.Tensor = small.unflatten(1, (-1, BLOCK // 2))
    return blocks.flatten(2).any(dim=2).to(torch.uint8)
