"""What each rank writes of a checkpoint, to the byte, before there is any state to save.

A rank's file holds a frame for each chunk of rows of a weight or a moment that the rank stands for,
then its generators (``shoal.checkpoint.shard``). Of equal replicas each writes a part: large
parameters are divided by rows, small ones dealt out in turn. The counters, some kilobytes in the
first rank's file, are not counted.

With ``checkpoint.asynchronous`` a rank has memory for copies of two such files, on its host.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from shoal.checkpoint import NUM_BUFFERS
from shoal.checkpoint.entry import Entry, share_of
from shoal.checkpoint.shard import ALIGNMENT, lay_out
from shoal.config import Config
from shoal.fsdp import ShardedParameter
from shoal.plan.group import Group, Layers, counted
from shoal.plan.groups import whole_shapes
from shoal.plan.held import place_of, rows_of
from shoal.plan.memory import state_rows
from shoal.plan.stage import StagePlan
from shoal.topology import Coordinates

Tensors = list[tuple[torch.Size, torch.dtype]]

_GENERATORS = {"cpu": (5056,), "cuda": (5056, 16)}
"""Bytes of the state of each of torch's generators that a rank has, by its device."""

_ROUTER = ".mlp.gate.weight"
"""How the names end of the parameters whose modules have a bias beside them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Written:
    """Bytes that one rank writes of a group's parameters."""

    always: int
    """Of those that replicas divide by rows, and of those that have no other replica."""
    in_turn: tuple[int, ...]
    """Of each of the others, where it is the rank's turn; by their place in the group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saves:
    """What the checkpoints of a run take."""

    file_bytes: tuple[int, ...]
    """Bytes of the file of each rank, by rank."""

    num_copies: int
    """Copies that each rank may have of its file in the memory of its host."""

    @property
    def num_bytes(self) -> int:
        """Bytes of one checkpoint."""
        return sum(self.file_bytes)

    def copy_bytes(self, ranks: Iterable[int]) -> int:
        """Bytes of all copies that ``ranks`` may have."""
        return self.num_copies * sum(self.file_bytes[rank] for rank in ranks)


def num_copies(config: Config) -> int:
    """Copies that each rank may have of what it saves."""
    return NUM_BUFFERS if config.checkpoint.asynchronous else 0


class StageSaves:
    """What the ranks of one pipeline stage write."""

    def __init__(self, stage: StagePlan, *, device: str) -> None:
        self._stage = stage
        self._counted = counted(stage.every_group)
        self._known: dict[tuple[Any, ...], _Written] = {}
        self._turns: dict[tuple[Layers, int], list[list[tuple[Group, int]]]] = {}
        generators = [(torch.Size([size]), torch.uint8) for size in _GENERATORS[device]]
        self._end = sum(map(_room, generators[:-1])) + _frame_bytes(generators[-1])

    def num_bytes(self, at: Coordinates) -> int:
        """Bytes of the file of the rank at ``at``."""
        total = self._end
        for group, count in self._counted:
            total += count * self._of(group, at).always
        examples: dict[Layers, Group] = {group.layers: group for group, _ in self._counted}
        for layers, group in examples.items():
            replica, num_replicas = group.replica(place_of(group, at))
            if num_replicas > 1:
                for own, index in self._dealt_out(layers, num_replicas)[replica]:
                    total += self._of(own, at).in_turn[index]
        return total

    def _dealt_out(self, layers: Layers, num_replicas: int) -> list[list[tuple[Group, int]]]:
        """By replica, the parameters whose turn is its: their groups, and places in these."""
        key = layers, num_replicas
        if key not in self._turns:
            turns: list[list[tuple[Group, int]]] = [[] for _ in range(num_replicas)]
            for number, (group, index) in enumerate(self._in_order()):
                if group.layers == layers:
                    turns[number % num_replicas].append((group, index))
            self._turns[key] = turns
        return self._turns[key]

    def _in_order(self) -> Iterable[tuple[Group, int]]:
        """The stage's parameters in the model's order."""
        for groups in self._stage.groups:
            found = {
                name: (group, index) for group in groups for index, name in enumerate(group.names)
            }
            yield from (found[name] for name in whole_shapes(self._stage.decoder) if name in found)

    def _of(self, group: Group, at: Coordinates) -> _Written:
        """Of groups that are alike, one is looked at."""
        is_first = group.layers == "dense" or at.expert == 0
        key = (*group.kind, group.is_copy, self._router(group), place_of(group, at), is_first)
        if key not in self._known:
            main_weights = self._stage.precision.main_weights
            rows = rows_of(group, at, self._stage.topology.expert, main_weights)
            self._known[key] = self._written(group, list(rows))
        return self._known[key]

    def _written(self, group: Group, held: list[ShardedParameter]) -> _Written:
        always, in_turn = 0, []
        for index, parameter in enumerate(held):
            rows = share_of(parameter.replica, parameter)  # as if it were its turn
            num_bytes = sum(map(_room, self._tensors(group, index, parameter, rows)))
            is_dealt = share_of(parameter.replica + 1, parameter) != rows
            always += 0 if is_dealt else num_bytes
            in_turn.append(num_bytes if is_dealt else 0)
        return _Written(always=always, in_turn=tuple(in_turn))

    def _tensors(
        self, group: Group, index: int, parameter: ShardedParameter, rows: slice
    ) -> Tensors:
        """Weights and state of some rows of a parameter; who has the first, its scalars too."""
        stage, num_rows = self._stage, rows.stop - rows.start
        if num_rows <= 0:
            return []
        kinds = [(parameter.shape[1:], stage.precision.main_weights)]
        kinds += state_rows(group, index, stage.optimizer, stage.precision)
        tensors = [(torch.Size([num_rows, *row]), dtype) for row, dtype in kinds]
        if parameter.row_start + rows.start == 0:
            tensors.append((torch.Size(), torch.float32))  # how many steps it had
            if index == self._router(group):
                tensors.append((parameter.shape[:1], torch.float32))
        return tensors

    def _router(self, group: Group) -> int | None:
        """Which of a group's parameters has a bias of experts beside it."""
        experts = self._stage.decoder.experts
        if experts is None or not experts.selection_bias:
            return None
        names = enumerate(group.names)
        return next((index for index, name in names if name.endswith(_ROUTER)), None)


@lru_cache(maxsize=2**16)
def _frame_bytes(tensor: tuple[torch.Size, torch.dtype]) -> int:
    """Bytes of a tensor in a file, all of its chunks."""
    sizes, dtype = tensor
    local = torch.empty(sizes, dtype=dtype, device="meta")
    entry = Entry(path=("",), shape=sizes, row_start=0, local=local)
    return lay_out(0, [entry], []).shard.num_bytes


def _room(tensor: tuple[torch.Size, torch.dtype]) -> int:
    """The same up to where another may begin."""
    return -(-_frame_bytes(tensor) // ALIGNMENT) * ALIGNMENT
