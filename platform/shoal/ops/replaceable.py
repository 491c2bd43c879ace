"""A seam under the decoder: other kernels in the place of every operation for a while.

    with fixed_order("bf16"):          # shoal.ops.fixed_order
        decoder(tokens)                # the same modules, other arithmetic

Each operation of this package is ``replaceable``: while kernels are in force, its call goes to
their method of the same name. The setting is of the context (thread or task) that made it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_KERNELS: ContextVar[object | None] = ContextVar("kernels", default=None)


def replaceable(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Make ``function`` give way to the method of its name of the kernels in force."""
    name = function.__name__

    @wraps(function)
    def chosen(*arguments: Parameters.args, **keywords: Parameters.kwargs) -> Result:
        kernels = _KERNELS.get()
        if kernels is None:
            return function(*arguments, **keywords)
        result: Result = getattr(kernels, name)(*arguments, **keywords)
        return result

    return chosen


@contextmanager
def kernels_in_force(kernels: object) -> Iterator[None]:
    """Send every replaceable operation to the methods of ``kernels``, all of which it must have."""
    token = _KERNELS.set(kernels)
    try:
        yield
    finally:
        _KERNELS.reset(token)
