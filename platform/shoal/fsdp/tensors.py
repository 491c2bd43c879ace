"""Tensors inside what a module takes or returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import torch


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Every tensor inside nested mappings, sequences, sets and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))
