"""Which parameters a unit owns: all beneath its module that are not beneath an inner unit's."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import nn

from shoal.errors import ConfigError
from shoal.fsdp.group import group_of
from shoal.fsdp.layout import check_rows
from shoal.fsdp.precision import SUPPORTED_DTYPES
from shoal.fsdp.slot import Slot
from shoal.fsdp.unit import unit_of


def owned_parameters(module: nn.Module) -> list[tuple[Slot, ...]]:
    """The parameters that a unit for ``module`` owns, each with the places where it is registered.

    Raises:
        ConfigError: for a parameter that another unit owns, or that cannot be sharded.
    """
    places: dict[int, list[Slot]] = {}
    for path, owner in _outside_units(module, ""):
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                slot = Slot(owner, name, f"{path}{name}")
                _check(slot.path, parameter)
                places.setdefault(id(parameter), []).append(slot)
    return [tuple(slots) for slots in places.values()]


def partition(
    parameters: list[tuple[Slot, ...]],
    apart: Collection[nn.Parameter] = (),
    quantized: Collection[nn.Parameter] = (),
) -> list[list[tuple[Slot, ...]]]:
    """Parameters by dtype and by whether they are frozen, in order of appearance.

    Those ``apart`` share no group with others, nor do those ``quantized``.
    """
    kinds = {
        id(parameter): kind for kind, held in enumerate((apart, quantized)) for parameter in held
    }
    groups: dict[tuple[torch.dtype, bool, int | None], list[tuple[Slot, ...]]] = {}
    for slots in parameters:
        parameter = slots[0].parameter
        key = (parameter.dtype, parameter.requires_grad, kinds.get(id(parameter)))
        groups.setdefault(key, []).append(slots)
    return list(groups.values())


def _outside_units(
    module: nn.Module, path: str, seen: set[int] | None = None
) -> Iterator[tuple[str, nn.Module]]:
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    yield path, module
    for name, child in module.named_children():
        if unit_of(child) is None:
            yield from _outside_units(child, f"{path}{name}.", seen)


def _check(name: str, parameter: nn.Parameter) -> None:
    if group_of(parameter) is not None:
        raise ConfigError(
            name,
            tuple(parameter.shape),
            "another unit owns this parameter",
            "Shard inner modules before outer ones, and let modules with tied weights share a unit",
        )
    check_rows(name, parameter.shape)
    if parameter.dtype not in SUPPORTED_DTYPES:
        raise ConfigError(
            name,
            parameter.dtype,
            "parameters of this format cannot be sharded",
            f"Use one of {', '.join(map(str, SUPPORTED_DTYPES))}",
        )
