"""What kernels compute with ``Lanes``: operators, comparisons, reductions, powers."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import lower_builtin, type_callable

from shoal.ops.fixed.lanes import (
    FLOATS,
    I32,
    WIDTH,
    WORDS,
    call,
    lanes,
    operation,
    single,
    splat,
    words,
)


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
