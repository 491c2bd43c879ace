"""What kernels load and store, by address: numbers, vectors of them, and bytes.

bf16 numbers are widened to fp32 as they are loaded and rounded to nearest even as they are stored,
both by integer operations, so that subnormal numbers survive.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from shoal.ops.fixed.arithmetic import broadcast
from shoal.ops.fixed.lanes import (
    F32,
    FLOATS,
    I32,
    I64,
    WIDTH,
    WORDS,
    address,
    device,
    lanes,
    operation,
    pointer,
    single,
    words,
)

_HALVES = ir.VectorType(ir.IntType(16), WIDTH)


@operation(types.int64, address)
def read_int(builder: ir.IRBuilder, where: ir.Value) -> ir.Value:
    """The int64 at ``where``."""
    return builder.load(pointer(builder, where, I64), align=8)


@operation(types.void, address, types.int64)
def write_int(builder: ir.IRBuilder, where: ir.Value, value: ir.Value) -> ir.Value:
    """Store an int64."""
    return builder.store(value, pointer(builder, where, I64), align=8)


@operation(types.int64, address)
def read_int32(builder: ir.IRBuilder, where: ir.Value) -> ir.Value:
    """The int32 at ``where``."""
    return builder.sext(builder.load(pointer(builder, where, I32), align=4), I64)


@operation(single, address)
def read_float(builder: ir.IRBuilder, where: ir.Value) -> ir.Value:
    """The fp32 number at ``where``."""
    return builder.load(pointer(builder, where, F32), align=4)


@operation(types.void, address, single)
def write_float(builder: ir.IRBuilder, where: ir.Value, value: ir.Value) -> ir.Value:
    """Store an fp32 number."""
    return builder.store(value, pointer(builder, where, F32), align=4)


@operation(types.int64, address)
def read_byte(builder: ir.IRBuilder, where: ir.Value) -> ir.Value:
    """The 8 bits at ``where``."""
    return builder.zext(builder.load(pointer(builder, where, ir.IntType(8)), align=1), I64)


@operation(types.int64, address)
def read_half(builder: ir.IRBuilder, where: ir.Value) -> ir.Value:
    """The 16 bits at ``where``."""
    return builder.zext(builder.load(pointer(builder, where, ir.IntType(16)), align=2), I64)


@operation(types.void, address, types.int64)
def write_half(builder: ir.IRBuilder, where: ir.Value, value: ir.Value) -> ir.Value:
    """Store the lowest 16 bits."""
    half = ir.IntType(16)
    return builder.store(builder.trunc(value, half), pointer(builder, where, half), align=2)


@operation(types.void, address, types.int64)
def write_int32(builder: ir.IRBuilder, where: ir.Value, value: ir.Value) -> ir.Value:
    """Store the lowest 32 bits."""
    return builder.store(builder.trunc(value, I32), pointer(builder, where, I32), align=4)


@operation(types.void, address, address, types.int64)
def copy_bytes(builder: ir.IRBuilder, to: ir.Value, source: ir.Value, count: ir.Value) -> None:
    """Copy ``count`` bytes between places that do not overlap."""
    byte = ir.IntType(8)
    cgutils.raw_memcpy(
        builder, pointer(builder, to, byte), pointer(builder, source, byte), count, 1, align=1
    )


@operation(lanes, address)
def load_floats(builder: ir.IRBuilder, where: ir.Value) -> ir.Value:
    """16 fp32 numbers."""
    return builder.load(pointer(builder, where, FLOATS), align=4)


@operation(types.void, address, lanes)
def store_floats(builder: ir.IRBuilder, where: ir.Value, value: ir.Value) -> ir.Value:
    """Store 16 fp32 numbers."""
    return builder.store(value, pointer(builder, where, FLOATS), align=4)


@operation(lanes, address)
def load_halves(builder: ir.IRBuilder, where: ir.Value) -> ir.Value:
    """16 bf16 numbers, widened."""
    halves = builder.load(pointer(builder, where, _HALVES), align=2)
    return builder.bitcast(builder.shl(builder.zext(halves, WORDS), words(16)), FLOATS)


def _nearest_half(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Words whose upper half is the nearest bf16, ties to even; what is no number stays none."""
    bits = builder.bitcast(value, WORDS)
    odd = builder.and_(builder.lshr(bits, words(16)), words(1))
    nearest = builder.add(builder.add(bits, words(0x7FFF)), odd)
    silent = builder.or_(bits, words(0x00400000))
    return builder.select(builder.fcmp_unordered("uno", value, value), silent, nearest)


@operation(types.void, address, lanes)
def store_halves(builder: ir.IRBuilder, where: ir.Value, value: ir.Value) -> ir.Value:
    """Store 16 numbers as bf16, rounded to nearest even."""
    halves = builder.trunc(builder.lshr(_nearest_half(builder, value), words(16)), _HALVES)
    return builder.store(halves, pointer(builder, where, _HALVES), align=2)


@operation(lanes, lanes)
def _rounded_half(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    bits = builder.and_(_nearest_half(builder, value), words(-65536))
    return builder.bitcast(bits, FLOATS)


def stack(count: int) -> Any:
    """A kernel function that gives the address of ``count`` times 64 bytes of its own."""

    @operation(address)
    def reserve(builder: ir.IRBuilder) -> ir.Value:
        # Not by numba's own function, which would also fill it with zeros at every call.
        with builder.goto_entry_block():
            return builder.ptrtoint(builder.alloca(ir.ArrayType(FLOATS, count)), I64)

    return reserve


buffer = stack(1)


@operation(single, types.int64)
def float_of(builder: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    """The fp32 number that a kernel was given as an argument."""
    return builder.bitcast(builder.trunc(bits, I32), F32)


@device
def load(where: Any, count: Any, size: Any) -> Any:
    """Up to 16 numbers of ``size`` bytes each: bf16 if 2, fp32 if 4; zeros past ``count``."""
    if count < 16:
        place = buffer()
        store_floats(place, broadcast(0.0))
        copy_bytes(place, where, count * size)
        where = place
    if size == 2:
        return load_halves(where)
    return load_floats(where)


@device
def store(where: Any, value: Any, count: Any, size: Any) -> None:
    """Store the first ``count`` of 16 numbers as bf16 if ``size`` is 2, as fp32 if it is 4."""
    place = where
    if count < 16:
        place = buffer()
    if size == 2:
        store_halves(place, value)
    else:
        store_floats(place, value)
    if count < 16:
        copy_bytes(where, place, count * size)


@device
def rounded(value: Any, size: Any) -> Any:
    """``value`` as a number of ``size`` bytes would hold it: bf16 if 2, itself if 4."""
    if size == 2:
        return _rounded_half(value)
    return value
