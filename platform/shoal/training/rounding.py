"""How updated weights become main weights.

bf16 holds the upper half of an fp32 number's bits. Rounded to nearest, an update of less than half
a step of bf16 is lost, every time. Rounded stochastically, the weight moves up by a whole step with
a probability in proportion to what is beyond it, so that it moves as far as it should on average
(Gupta, Agrawal, Gopalakrishnan and Narayanan, "Deep learning with limited numerical precision",
ICML 2015)::

    fp32      s eeeeeeee mmmmmmm|mmmmmmmmmmmmmmmm
    add                         |rrrrrrrrrrrrrrrr      16 random bits; a carry rounds up
    bf16      s eeeeeeee mmmmmmm|

The random bits of element i are a function of the run's seed, the parameter's name, i and the
number of updates: no layout, no rank and no restart changes them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from shoal.fsdp import ShardedParameter
from shoal.ops import Words, philox

_BLOCK = 2**20
"""Elements rounded at a time: their random bits take eight times their memory."""

_LANES = 8
"""Draws of 16 bits in the four words of a counter."""


class Rounding(Protocol):
    """Makes main weights of updated ones."""

    def rounded(
        self, parameter: torch.Tensor, value: torch.Tensor, update: torch.Tensor
    ) -> torch.Tensor:
        """``value`` (fp32) in the format of ``parameter``, of which it is the new value.

        ``update`` counts the parameter's updates, a scalar on its device.
        """


class Nearest:
    """Rounds to the nearest number, to the even one of two."""

    def rounded(
        self, parameter: torch.Tensor, value: torch.Tensor, update: torch.Tensor
    ) -> torch.Tensor:
        """See ``Rounding``."""
        return value.to(parameter.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where the rows of a parameter held here lie among all draws."""

    key: tuple[int, int]
    first: int
    """Index of the first element in the whole parameter."""


class Stochastic:
    """Rounds to bf16, up or down by chance; the average is the value itself."""

    def __init__(self, parameters: Sequence[ShardedParameter], seed: int) -> None:
        self._places: dict[torch.Tensor, _Place] = {
            parameter.local: _Place(
                key=_key(seed, parameter.name),
                first=parameter.row_start * parameter.shape[1:].numel(),
            )
            for parameter in parameters
        }

    def rounded(
        self, parameter: torch.Tensor, value: torch.Tensor, update: torch.Tensor
    ) -> torch.Tensor:
        """See ``Rounding``; for parameters of bf16."""
        place, count = self._places[parameter], update.to(torch.int64)
        result = torch.empty_like(parameter)
        pairs = zip(result.view(-1).split(_BLOCK), value.reshape(-1).split(_BLOCK), strict=True)
        for number, (target, block) in enumerate(pairs):
            first = place.first + number * _BLOCK
            noise = _draws(place.key, first, first + block.numel(), count)
            target.copy_(_cut(block, noise))
        return result


def _key(seed: int, name: str) -> tuple[int, int]:
    digest = hashlib.blake2b(name.encode(), digest_size=8, key=seed.to_bytes(8, "little")).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def _draws(key: tuple[int, int], start: int, stop: int, update: torch.Tensor) -> torch.Tensor:
    """16 random bits for each of the elements ``start`` to ``stop``, int32."""
    first = start // _LANES
    blocks = torch.arange(first, -(-stop // _LANES), device=update.device)
    mask = 0xFFFFFFFF
    counter: Words = (blocks & mask, blocks >> 32, update & mask, update >> 32)
    words = torch.stack(philox(counter, key), dim=1)
    lanes = torch.stack([words & 0xFFFF, words >> 16], dim=2).view(-1)
    return lanes[start - first * _LANES : stop - first * _LANES].to(torch.int32)


def _cut(value: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """fp32 values of which bf16 holds every bit; what is not finite stays as it is."""
    bits = value.contiguous().view(torch.int32)
    rounded = ((bits + noise) & -0x10000).view(torch.float32)
    return torch.where(value.isfinite(), rounded, value)
