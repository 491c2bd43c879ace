"""Reading Megatron's arguments out of ``common.pt`` without running what is pickled there."""

from __future__ import annotations

import pickle
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

from shoal.errors import WorkError

_KNOWN: dict[tuple[str, str], type] = {
    ("argparse", "Namespace"): Namespace,
    ("collections", "OrderedDict"): OrderedDict,
}


class _Inert:
    """Stands for an object of any other class: takes all that a pickle does, and does nothing."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __call__(self, *args: object, **kwargs: object) -> _Inert:
        return self

    def __setstate__(self, state: object) -> None:
        pass

    def __setitem__(self, key: object, value: object) -> None:
        pass

    def append(self, value: object) -> None:
        """Of a list."""

    def extend(self, values: object) -> None:
        """Of a list."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        return _KNOWN.get((module_name, global_name), _Inert)


class _InertPickle:
    """What ``torch.load`` takes in the place of ``pickle``."""

    Unpickler = _Unpickler


def read_arguments(path: Path) -> Namespace | None:
    """The arguments in ``common.pt``; None where it has none, as of Megatron Core used alone.

    Megatron pickles its own classes among them, so an unpickler reads the file that knows
    namespaces and plain values only. Raises ``WorkError`` for a damaged file.
    """
    try:
        values = torch.load(
            path, map_location="cpu", pickle_module=_InertPickle, weights_only=False
        )
    except FileNotFoundError:
        return None
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise WorkError(f"{path} is damaged ({error}); copy it again") from error
    arguments = values.get("args") if isinstance(values, dict) else None
    return arguments if isinstance(arguments, Namespace) else None
