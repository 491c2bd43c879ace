"""Functions compiled by numba, whose machine code is kept on disk."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from numba.core import caching, ccallback, types

logger = logging.getLogger(__name__)


def compiled(function: Callable[..., None], name: str, *parameters: types.Type) -> int:
    """The address of ``function`` of ``parameters`` as a C function that returns nothing.

    It is compiled, or found on disk under ``name``, which is its own within this package.
    """
    function.__name__ = function.__qualname__ = name
    result = _Function(function, (parameters, types.void), locals={}, options={"nogil": True})
    try:
        result.enable_caching()
    except RuntimeError as error:
        logger.warning("kernel %s is compiled at every start: %s", name, error)
    result.compile()
    address = result.address
    assert address is not None
    return address


@cache
def source_hash() -> str:
    """A hash of this package's sources: compiled code of other sources is not used."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


class _OfPackage:
    """What numba's cache asks of a function's source, answered for the package as a whole.

    numba would look at the file of the function alone, and miss changes of the functions it calls.
    """

    def get_source_stamp(self) -> str:
        return source_hash()


class _Given(_OfPackage, caching.UserProvidedCacheLocator):
    pass


class _InTree(_OfPackage, caching.InTreeCacheLocator):
    pass


class _UserWide(_OfPackage, caching.UserWideCacheLocator):
    pass


class _Contents(caching.CompileResultCacheImpl):
    _locator_classes = [_Given, _InTree, _UserWide]


class _Cache(caching.FunctionCache):
    _impl_class = _Contents

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        # The name stands for the function, the stamp for its code and for what it calls.
        return sig, codegen.magic_tuple()


class _Function(ccallback.CFunc):
    def enable_caching(self) -> None:
        self._cache = _Cache(self.__wrapped__)  # type: ignore[no-untyped-call]

    def _compile_uncached(self) -> Any:
        _announce()
        return super()._compile_uncached()  # type: ignore[misc]


@cache
def _announce() -> None:
    """Say, once in a process, why nothing else happens for a while."""
    logger.info("compiling the kernels for this CPU, which takes some ten seconds")
