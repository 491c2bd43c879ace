"""What this rank holds of a sharded model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from shoal.errors import ConfigError
from shoal.fsdp.group import ParameterGroup
from shoal.fsdp.sharded import ShardedParameter
from shoal.fsdp.unit import Unit, unit_of


@dataclass(frozen=True, slots=True, kw_only=True)
class BytesAtRest:
    """Memory of this rank's buffers between two steps, by what they hold."""

    main_weights: int
    """What the optimizer updates."""

    compute_weights: int
    """What compute uses, where that is not the main weights themselves."""

    gradients: int
    """Final gradients."""

    @property
    def total(self) -> int:
        """All of them."""
        return self.main_weights + self.compute_weights + self.gradients


def is_sharded(model: nn.Module) -> bool:
    """Whether some module of ``model`` is a unit."""
    return next(units_of(model), None) is not None


def sharded_parameters(model: nn.Module) -> tuple[ShardedParameter, ...]:
    """Every sharded parameter beneath ``model``, named from there, in the model's own order.

    Raises:
        ConfigError: where ``model`` holds a parameter that was not sharded.
    """
    paths: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(id(module), []).append(f"{name}." if name else "")
    order = {name: place for place, (name, _) in enumerate(_names(model))}
    found = []
    for group in groups_of(model):
        for index, entry in enumerate(group.entries):
            names = [path + s.name for s in entry.slots for path in paths.get(id(s.module), [])]
            names.sort(key=order.__getitem__)
            part = group.layout.shapes[index]
            first_row = group.share.first_row(part) + group.weights.main.rows(index).start
            found.append(
                ShardedParameter(
                    names=tuple(names),
                    shape=group.share.whole(part),
                    row_start=first_row,
                    local=entry.local,
                    primary=group.primary,
                    replica=group.replica,
                    num_replicas=1 if group.is_copy else group.num_replicas,
                )
            )
    covered = {name for parameter in found for name in parameter.names}
    for name, parameter in _names(model):
        if name not in covered:
            raise ConfigError(
                name,
                tuple(parameter.shape),
                "no unit owns this parameter",
                "Shard the outermost module as well",
            )
    return tuple(sorted(found, key=lambda parameter: order[parameter.name]))


def sync_weights(model: nn.Module) -> None:
    """Let compute use the main weights as they are now; call it after changing them by hand.

    Every rank calls it. Steps of an adapted optimizer do it by themselves.
    """
    for group in groups_of(model):
        group.sync()


def bytes_at_rest(model: nn.Module) -> BytesAtRest:
    """Memory of the buffers beneath ``model`` on this rank; what ranks share counts for each."""
    groups = list(groups_of(model))
    return BytesAtRest(
        main_weights=sum(group.weights.main.nbytes for group in groups),
        compute_weights=sum(group.weights.compute_bytes for group in groups),
        gradients=sum(g.gradients.final.nbytes for g in groups if g.gradients is not None),
    )


def units_of(model: nn.Module) -> Iterator[Unit]:
    """The units beneath ``model``, outer ones first."""
    for module in model.modules():
        unit = unit_of(module)
        if unit is not None:
            yield unit


def groups_of(model: nn.Module) -> Iterator[ParameterGroup]:
    """The parameter groups of those units."""
    for unit in units_of(model):
        yield from unit.groups


def _names(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return model.named_parameters(remove_duplicate=False)
