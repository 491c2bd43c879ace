"""The orders in which units are expected to run, which decide what is prefetched.

Units form a tree along the modules. For ``root(left(inner), right)``::

    forward    root, left, inner, right      each unit, then its children
    backward   root, right, left, inner      each unit, then its children in reverse

Several roots follow each other in the order of construction, in backward in reverse.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from shoal.fsdp.unit import Unit, unit_of


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitTree:
    """A unit and the units inside it."""

    unit: Unit
    children: tuple[UnitTree, ...]

    def forward(self) -> Iterator[Unit]:
        """Units in forward order."""
        yield self.unit
        for child in self.children:
            yield from child.forward()

    def backward(self) -> Iterator[Unit]:
        """Units in backward order."""
        yield self.unit
        for child in reversed(self.children):
            yield from child.backward()


def unit_trees(units: Sequence[Unit]) -> list[UnitTree]:
    """The trees of ``units``, which are in order of construction."""
    trees = {id(unit): _tree(unit) for unit in units}
    inside = {id(unit) for tree in trees.values() for unit in list(tree.forward())[1:]}
    return [trees[id(unit)] for unit in units if id(unit) not in inside]


def _tree(unit: Unit) -> UnitTree:
    return UnitTree(unit=unit, children=tuple(_children(unit.module, {id(unit.module)})))


def _children(module: nn.Module, seen: set[int]) -> Iterable[UnitTree]:
    """Trees of the nearest units beneath a module; a module found twice counts once."""
    for child in module.children():
        if id(child) in seen:
            continue
        seen.add(id(child))
        unit = unit_of(child)
        below = tuple(_children(child, seen))
        if unit is None:
            yield from below
        else:
            yield UnitTree(unit=unit, children=below)
