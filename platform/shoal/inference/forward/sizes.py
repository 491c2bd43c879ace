"""How much memory a served model takes, from its config alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import torch

from shoal.inference.forward.model import ServedModel
from shoal.inference.forward.precision import Precision
from shoal.models import DecoderConfig, parameter_shapes


class _Shapes:
    """A ``WeightSource`` on the meta device: shapes without numbers."""

    def __init__(self, config: DecoderConfig) -> None:
        self._shapes = parameter_shapes(config)

    def shapes(self) -> Mapping[str, torch.Size]:
        return self._shapes

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        shape = self._shapes[name]
        return torch.empty(stop - start, *shape[1:], dtype=torch.bfloat16, device="meta")


def weight_bytes(
    config: DecoderConfig, precision: Precision, *, batch_invariant: bool = True
) -> int:
    """Bytes of the weights as an engine packs them, and of its table of rotary angles.

    The engine's own code is what packs, on the meta device, so nothing is allocated. oneDNN's
    layouts, without ``batch_invariant``, are taken to be as large as the matrices.
    """
    model = ServedModel(config, _Shapes(config), precision, batch_invariant=batch_invariant)
    return sum(tensor.nbytes for tensor in _tensors(model))


def _tensors(thing: object) -> Iterator[torch.Tensor]:
    """Every tensor that ``thing`` is, holds, or whose parts hold it."""
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, list | tuple):
        for part in thing:
            yield from _tensors(part)
    elif isinstance(thing, DecoderConfig):
        return
    elif dataclasses.is_dataclass(thing):
        for field in dataclasses.fields(thing):
            yield from _tensors(getattr(thing, field.name))
    else:
        for part in getattr(thing, "__dict__", {}).values():
            yield from _tensors(part)
