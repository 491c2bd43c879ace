"""Sixteen fp32 numbers at a time, as a value that numba kernels compute with.

A kernel of this package is Python that numba compiles. It names memory by addresses (``int``) and
computes on ``Lanes``, an LLVM vector of 16 floats: functions of ``memory`` load and store them,
those of ``arithmetic`` compute and reduce. Nothing is left for a compiler to reorder: no fast
math, products are fused with sums only where ``fma`` says so, and a reduction is always the same
tree. So the bits of a result do not depend on the vector registers of the machine: where they are
narrower than 16 floats, LLVM splits each operation.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import numba
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic, models, register_model

WIDTH = 16
"""Numbers in a ``Lanes``."""

BYTES = 64
"""Bytes of a ``Lanes`` in memory, and of 16 pairs of bf16."""

F32 = ir.FloatType()
I32 = ir.IntType(32)
I64 = ir.IntType(64)
FLOATS = ir.VectorType(F32, WIDTH)
WORDS = ir.VectorType(I32, WIDTH)

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
