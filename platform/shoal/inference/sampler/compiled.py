"""Loops that numba compiles, once per machine if there is a place to keep the result."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

logger = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Compile ``function`` when it is called first: strict IEEE arithmetic, without the GIL."""
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    result: Any
    try:
        result = numba.njit(cache=True, **options)(function)
    except RuntimeError as error:  # neither beside the sources nor at home may files be written
        logger.warning("%s is compiled at every start: %s", function.__name__, error)
        result = numba.njit(**options)(function)
    return cast(Function, result)


def inlined(function: Function) -> Function:
    """Let compiled loops of the same file call ``function`` as if it were written there."""
    return cast(Function, numba.njit(inline="always", error_model="numpy")(function))
