"""Muon: momentum, orthogonalized, for matrices inside the layers; AdamW for everything else.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024). A matrix's update
is the orthogonal matrix nearest to its (Nesterov) momentum, times 0.2 sqrt(max(rows, columns)):
that makes it as large as AdamW's usually are, so that one learning rate and one decay serve both
(Liu et al., "Muon is Scalable for LLM Training", arXiv:2502.16982).

Each matrix is orthogonalized whole, by one rank (``shoal.fsdp.map_matrices``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from shoal.fsdp import Matrix, ParameterGroup, deal, group_of, map_matrices, num_places
from shoal.training.adamw import AdamW
from shoal.training.moments import Moments
from shoal.training.orthogonal import orthogonalized
from shoal.training.rounding import Rounding
from shoal.training.updates import Params, wide_gradients

HIDDEN = "hidden"
"""Key of parameter groups: whether their parameters stack matrices of the layers."""

UPDATE_SIZE = 0.2
"""Root mean square of an update of learning rate 1, as AdamW's usually have it."""

_MOMENTUM = "momentum_buffer"


class Muon(AdamW):
    """Muon for parameter groups with ``hidden`` set, AdamW for the others.

    State of a hidden parameter besides ``step``: ``momentum_buffer``, as ``Moments`` keeps it.
    """

    def __init__(
        self,
        params: Params,
        *,
        lr: float,
        momentum: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        moments: Moments,
        matrix_rows: Mapping[torch.Tensor, int],
        compute: torch.dtype,
        rounding: Rounding | None = None,
    ) -> None:
        """As ``AdamW``, and for hidden parameters:

        Args:
            momentum: Decay of the running average of gradients.
            matrix_rows: Rows of each of the matrices that a parameter stacks.
            compute: Format in which matrices travel and are orthogonalized.
        """
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            moments=moments,
            rounding=rounding,
        )
        self._momentum = momentum
        self._matrix_rows = dict(matrix_rows)
        self._compute = compute
        self._plans: dict[ParameterGroup, list[Matrix]] | None = None

    def _step_group(self, group: dict[str, Any]) -> None:
        if not group.get(HIDDEN):
            super()._step_group(group)
            return
        units: dict[ParameterGroup, list[torch.Tensor]] = {}
        for parameter in group["params"]:
            unit = group_of(parameter)
            if unit is None:
                self._step_alone(parameter, group)
            else:
                units.setdefault(unit, []).append(parameter)
        if self._plans is None:
            self._plans = self._deal_out(list(units))
        for unit, parameters in units.items():
            # Ranks differ in which gradients they have, but not in which they want.
            if any(parameter.requires_grad for parameter in parameters):
                self._step_unit(unit, parameters, group)

    def _step_alone(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        """Update a parameter that is no shard."""
        if parameter.grad is None:
            return
        matrices = self._direction(parameter).to(self._compute).split(self._matrix_rows[parameter])
        made = torch.cat([orthogonalized(matrix) for matrix in matrices])
        self._apply([parameter], [made], group)

    def _step_unit(
        self, unit: ParameterGroup, parameters: list[torch.Tensor], group: dict[str, Any]
    ) -> None:
        """Update one unit's parameters; every rank of its mesh takes part, whatever it holds."""
        assert self._plans is not None
        places: dict[torch.Tensor, int] = {e.local: i for i, e in enumerate(unit.entries)}
        with_gradient = [parameter for parameter in parameters if parameter.grad is not None]
        made = map_matrices(
            unit,
            {places[parameter]: self._direction(parameter) for parameter in with_gradient},
            self._plans[unit],
            orthogonalized,
            self._compute,
        )
        self._apply(with_gradient, [made[places[parameter]] for parameter in with_gradient], group)

    def _direction(self, parameter: torch.Tensor) -> torch.Tensor:
        """What of a parameter is to be orthogonalized, fp32; counts its gradient in."""
        (gradient,) = wide_gradients([parameter])
        before = self._averages(parameter, _MOMENTUM)
        average = torch.lerp(before, gradient, 1 - self._momentum)
        self._moments.write(self.state[parameter], _MOMENTUM, average, self._skip)
        return gradient.lerp(average, self._momentum)

    def _apply(
        self, parameters: list[torch.Tensor], made: list[torch.Tensor], group: dict[str, Any]
    ) -> None:
        steps = self._count(parameters)
        lr, decay = group["lr"], 1 - group["lr"] * group["weight_decay"]
        values = [
            parameter.float() * decay - direction.float() * (lr * self._size(parameter))
            for parameter, direction in zip(parameters, made, strict=True)
        ]
        self._store_weights(parameters, values, steps)

    def _size(self, parameter: torch.Tensor) -> float:
        rows, columns = self._matrix_rows[parameter], parameter.shape[1]
        return UPDATE_SIZE * math.sqrt(max(rows, columns))

    def _deal_out(self, units: list[ParameterGroup]) -> dict[ParameterGroup, list[Matrix]]:
        """An owner for every matrix; ranks of a mesh get about as much to do."""
        loads: dict[frozenset[int], list[float]] = {}
        plans = {}
        for unit in units:
            load = loads.setdefault(unit.grid.members, [0.0] * num_places(unit.grid))
            matrices = list(self._matrices(unit))
            owners = deal([cost for *_, cost in matrices], load)
            plans[unit] = [
                Matrix(index=index, start=start, stop=stop, owner=owner)
                for (index, start, stop, _), owner in zip(matrices, owners, strict=True)
            ]
        return plans

    def _matrices(self, unit: ParameterGroup) -> Iterator[tuple[int, int, int, float]]:
        """Parameter, first and last row, and cost of each matrix of a unit."""
        shapes = zip(unit.entries, unit.layout.shapes, strict=True)
        for index, (entry, shape) in enumerate(shapes):
            rows = self._matrix_rows.get(entry.local)
            if rows is None:
                continue
            cost = float(min(rows, shape[1]) ** 2 * max(rows, shape[1]))
            for start in range(0, shape[0], rows):
                yield index, start, start + rows, cost
