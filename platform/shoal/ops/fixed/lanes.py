"""Sixteen fp32 numbers at a time, as a value that numba kernels compute with.

A kernel of this package is Python that numba compiles. It names memory by addresses (``int``) and
computes on ``Lanes``, an LLVM vector of 16 floats: ``+ - * /`` work on them, and the functions
below load, store, widen, round and reduce. Nothing is left for a compiler to reorder: no fast
math, products are fused with sums only where ``fma`` says so, and a reduction is always the same
tree. So the bits of a result do not depend on the vector registers of the machine: where they are
narrower than 16 floats, LLVM splits each operation.

bf16 numbers are widened to fp32 as they are loaded and rounded to nearest even as they are stored,
both by integer operations, so that subnormal numbers survive.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import Any, TypeVar

import numba
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic, lower_builtin, models, register_model, type_callable

WIDTH = 16
"""Numbers in a ``Lanes``."""

BYTES = 64
"""Bytes of a ``Lanes`` in memory, and of 16 pairs of bf16."""

F32 = ir.FloatType()
I32 = ir.IntType(32)
I64 = ir.IntType(64)
FLOATS = ir.VectorType(F32, WIDTH)
WORDS = ir.VectorType(I32, WIDTH)
_HALVES = ir.VectorType(ir.IntType(16), WIDTH)

Function = TypeVar("Function", bound=Callable[..., Any])


class LanesType(types.Type):
    """The numba type of a ``Lanes``."""

    def __init__(self) -> None:
        super().__init__(name="Lanes")


lanes = LanesType()
address = types.int64
single = types.float32


@register_model(LanesType)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: LanesType) -> None:
        super().__init__(manager, kind, FLOATS)  # type: ignore[no-untyped-call]


def device(function: Function) -> Function:
    """Compile ``function`` for use inside kernels."""
    compiled: Function = numba.njit(function, error_model="numpy")
    return compiled


def operation(result: types.Type, *parameters: types.Type) -> Callable[[Callable[..., Any]], Any]:
    """Make a function that emits LLVM instructions, ``emit(builder, *values)``, a kernel function.

    Its arguments are converted to ``parameters``; what it returns has the type ``result``.
    """

    def define(emit: Callable[..., Any]) -> Any:
        def typed(_context: Any, *_arguments: Any) -> Any:
            def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
                emitted = emit(builder, *values)
                return context.get_dummy_value() if result == types.void else emitted

            return result(*parameters), generate

        # numba wants to see the parameters: a context and what the kernel passes.
        names = ["context", *(f"argument_{number}" for number in range(len(parameters)))]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        typed.__signature__ = inspect.Signature([inspect.Parameter(n, kind) for n in names])  # type: ignore[attr-defined]
        typed.__name__ = typed.__qualname__ = emit.__name__
        typed.__doc__ = emit.__doc__
        return intrinsic(typed)

    return define


def pointer(builder: ir.IRBuilder, where: ir.Value, kind: ir.Type) -> ir.Value:
    """The address ``where`` as a pointer to ``kind``."""
    return builder.inttoptr(where, kind.as_pointer())


def splat(builder: ir.IRBuilder, value: ir.Value, kind: ir.VectorType) -> ir.Value:
    """A vector that holds ``value`` in every lane."""
    undefined = ir.Constant(kind, ir.Undefined)
    one = builder.insert_element(undefined, value, ir.Constant(I32, 0))
    return builder.shuffle_vector(one, undefined, ir.Constant(WORDS, [0] * WIDTH))


def words(value: int) -> ir.Constant:
    """A constant with ``value`` in each of 16 words."""
    return ir.Constant(WORDS, [value] * WIDTH)


def call(builder: ir.IRBuilder, name: str, kind: ir.Type, *values: ir.Value) -> ir.Value:
    """Call the LLVM intrinsic ``name``, whose arguments and result are of ``kind``."""
    signature = ir.FunctionType(kind, [kind] * len(values))
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), values)


# --- memory -----------------------------------------------------------------------------------


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


# --- arithmetic -------------------------------------------------------------------------------


@operation(lanes, single)
def broadcast(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """A number in every lane."""
    return splat(builder, value, FLOATS)


def _operator(symbol: Any, instruction: str) -> None:
    """Let ``symbol`` between two ``Lanes`` emit ``instruction``."""

    @type_callable(symbol)
    def _typed(_context: Any) -> Any:
        def result(left: Any, right: Any) -> Any:
            return lanes if left == right == lanes else None

        return result

    @lower_builtin(symbol, lanes, lanes)  # type: ignore[untyped-decorator]
    def _generate(_context: Any, builder: ir.IRBuilder, _signature: Any, values: Any) -> Any:
        return getattr(builder, instruction)(*values)


_operator(operator.add, "fadd")
_operator(operator.sub, "fsub")
_operator(operator.mul, "fmul")
_operator(operator.truediv, "fdiv")


@operation(lanes, lanes, lanes, lanes)
def fma(builder: ir.IRBuilder, left: ir.Value, right: ir.Value, addend: ir.Value) -> ir.Value:
    """``left * right + addend``, rounded once."""
    return call(builder, "llvm.fma.v16f32", FLOATS, left, right, addend)


@operation(lanes, lanes, lanes)
def larger(builder: ir.IRBuilder, left: ir.Value, right: ir.Value) -> ir.Value:
    """The larger of each two numbers; what is no number wins, so that it is not hidden."""
    keep = builder.or_(
        builder.fcmp_unordered("uno", left, left), builder.fcmp_ordered(">", left, right)
    )
    return builder.select(keep, left, right)


@operation(lanes, lanes, types.int64, types.int64, single)
def keep(
    builder: ir.IRBuilder, value: ir.Value, start: ir.Value, stop: ir.Value, other: ir.Value
) -> ir.Value:
    """Lanes ``start`` to ``stop`` of ``value``, and ``other`` in the rest."""
    index = ir.Constant(WORDS, list(range(WIDTH)))
    first = splat(builder, builder.trunc(start, I32), WORDS)
    last = splat(builder, builder.trunc(stop, I32), WORDS)
    inside = builder.and_(
        builder.icmp_signed(">=", index, first), builder.icmp_signed("<", index, last)
    )
    return builder.select(inside, value, splat(builder, other, FLOATS))


def tree(builder: ir.IRBuilder, value: ir.Value, join: Callable[..., ir.Value]) -> ir.Value:
    """Join lane i with lane i + 8, then i + 4, i + 2 and i + 1."""
    for distance in (8, 4, 2, 1):
        order = [lane + distance if lane < distance else lane for lane in range(WIDTH)]
        value = join(value, builder.shuffle_vector(value, value, ir.Constant(WORDS, order)))
    return builder.extract_element(value, ir.Constant(I32, 0))


@operation(single, lanes)
def total(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """The sum of the lanes."""
    return tree(builder, value, builder.fadd)


@operation(single, lanes)
def largest(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """The largest lane; none of them may be no number."""
    return tree(builder, value, lambda a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b))


# ln(2) ** n / n! for n from 6 down to 0: the next term is below 2e-8 at a half.
_SERIES = (
    1.540353039338161e-04,
    1.333355814642844e-03,
    9.618129107628477e-03,
    5.550410866482158e-02,
    2.402265069591007e-01,
    6.931471805599453e-01,
    1.0,
)
_BITS_PER_NAT = 1.4426950216293335  # log2(e), rounded to fp32
_BITS_PER_NAT_REST = 1.9259629911266175e-08


def _constant(value: float) -> ir.Constant:
    return ir.Constant(FLOATS, [value] * WIDTH)


def _power(
    builder: ir.IRBuilder, value: ir.Value, whole: ir.Value, rest: ir.Value, low: float, high: float
) -> ir.Value:
    """``2 ** (whole + rest)``; zero where ``value`` is below ``low``, infinite from ``high`` on."""
    result = _constant(_SERIES[0])
    for coefficient in _SERIES[1:]:
        result = call(builder, "llvm.fma.v16f32", FLOATS, result, rest, _constant(coefficient))
    small = builder.fcmp_ordered("<", value, _constant(low))
    large = builder.fcmp_ordered(">=", value, _constant(high))
    none = builder.fcmp_unordered("uno", value, value)
    wild = builder.or_(builder.or_(small, large), none)
    exponent = builder.fptosi(builder.select(wild, _constant(0.0), whole), WORDS)
    # Two factors, because 2 ** 128 is no number although 2 ** 127.7 is.
    half = builder.ashr(exponent, words(1))
    for part in (half, builder.sub(exponent, half)):
        bits = builder.shl(builder.add(part, words(127)), words(23))
        result = builder.fmul(result, builder.bitcast(bits, FLOATS))
    result = builder.select(small, _constant(0.0), result)
    result = builder.select(large, _constant(float("inf")), result)
    return builder.select(none, value, result)


@operation(lanes, lanes)
def power_of_two(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """``2 ** value`` to about 1 unit in the last place; zero below 2 ** -126."""
    whole = call(builder, "llvm.rint.v16f32", FLOATS, value)
    return _power(builder, value, whole, builder.fsub(value, whole), -126.0, 128.0)


@operation(lanes, lanes)
def exponential(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """``e ** value`` to about 1 unit in the last place; zero below 2 ** -126."""
    scale = _constant(_BITS_PER_NAT)
    whole = call(builder, "llvm.rint.v16f32", FLOATS, builder.fmul(value, scale))
    rest = call(builder, "llvm.fma.v16f32", FLOATS, value, scale, builder.fneg(whole))
    small = _constant(_BITS_PER_NAT_REST)
    rest = call(builder, "llvm.fma.v16f32", FLOATS, value, small, rest)
    return _power(builder, value, whole, rest, -87.33654, 88.72284)
