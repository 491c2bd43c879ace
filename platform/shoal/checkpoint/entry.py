"""What a checkpoint holds, as one rank sees it: rows of global tensors under global names.

    model.<parameter>                main weights, the whole parameter's shape
    model.<buffer>                   persistent buffers of the modules
    optimizer.<parameter>.<state>    moments, with the parameter's dim 0; scalars such as ``step``
    rng.<rank>.<device>              generator state of each rank, uint8
    counters                         step, schedule, sampler and so on: plain values

No key names a rank's place in a layout (``rng`` apart), so any layout can read what another wrote.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from shoal.errors import WorkError
from shoal.fsdp import ShardedParameter, sharded_parameters
from shoal.fsdp.unit import unit_of

COMPILED_PREFIX = "_orig_mod."
"""What ``torch.compile`` puts into names; a checkpoint must not depend on it."""

DIVIDED_BYTES = 4 * 2**20
"""Replicas divide the writing of parameters of this size by rows."""

_NO_ROWS = slice(0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Contiguous dim-0 rows of one global tensor, or a whole scalar."""

    path: tuple[str, ...]
    """Parts of the key; each part may hold dots."""

    shape: torch.Size
    """Shape of the whole tensor; empty for a scalar."""

    row_start: int
    """First dim-0 row held here; 0 for a scalar."""

    local: torch.Tensor
    """The rows held here, ``[rows, *shape[1:]]``, or the scalar. Loading fills it in place."""

    rows: slice | None = None
    """Which of the rows held here this rank writes, or of a scalar whether, as one row; unset for
    all. Of several holders of a row exactly one writes it."""

    @property
    def key(self) -> str:
        """The global name."""
        return ".".join(self.path)

    @property
    def written(self) -> Entry | None:
        """The part that this rank writes, if any."""
        if self.rows is None:
            return self
        if self.rows.start >= self.rows.stop:
            return None
        if not self.shape:
            return self
        start = self.row_start + self.rows.start
        return replace(self, row_start=start, local=self.local[self.rows], rows=None)


def held_parameters(model: nn.Module, *, rank: int, num_ranks: int) -> tuple[ShardedParameter, ...]:
    """What this rank holds of a sharded model's parameters, or of a plain one's.

    A plain model is a replica on every rank. Raises ConfigError for a model of which only a part is
    sharded.
    """
    if any(unit_of(module) is not None for module in model.modules()):
        return sharded_parameters(model)
    return tuple(
        ShardedParameter(
            names=(name,),
            shape=value.shape,
            row_start=0,
            local=value,
            primary=rank == 0,
            replica=rank,
            num_replicas=num_ranks,
        )
        for name, value in model.named_parameters()
    )


def weight_entries(parameters: Sequence[ShardedParameter]) -> list[Entry]:
    """Main weights; rows that are not held here are no entries."""
    return [
        Entry(
            path=("model", _plain(parameter.name)),
            shape=parameter.shape,
            row_start=parameter.row_start,
            local=parameter.local.detach(),
            rows=share_of(index, parameter),
        )
        for index, parameter in enumerate(parameters)
        if parameter.local.numel()
    ]


def buffer_entries(
    model: nn.Module, weights: Sequence[Entry], *, first_rank: bool, copies: bool
) -> list[Entry]:
    """Persistent buffers, or copies of them as they are now; see ``entries_of_buffers``."""
    buffers = {
        name: buffer.detach().clone() if copies else buffer.detach()
        for name, buffer in persistent_buffers(model).items()
    }
    return entries_of_buffers(buffers, _leaders(model), weights, first_rank=first_rank)


def entries_of_buffers(
    buffers: Mapping[str, torch.Tensor],
    leaders: Mapping[str, str],
    weights: Sequence[Entry],
    *,
    first_rank: bool,
) -> list[Entry]:
    """Buffers, which are replicas, beside this rank's ``weights``.

    ``leaders`` names the first parameter of each buffer's module. Who writes that one's first row
    writes the buffer: only some ranks may have the module. Those of a module without parameters are
    the first rank's.
    """
    begun = {part.path[1] for entry in weights if (part := entry.written) and not part.row_start}

    def is_own(name: str) -> bool:
        return leaders[name] in begun if name in leaders else first_rank

    return [
        Entry(
            path=("model", _plain(name)),
            shape=buffer.shape,
            row_start=0,
            local=buffer,
            rows=None if is_own(name) else _NO_ROWS,
        )
        for name, buffer in buffers.items()
        if buffer.numel()
    ]


def model_keys(model: nn.Module, parameters: Sequence[ShardedParameter]) -> set[str]:
    """Keys of the whole model, also of parameters of which this rank holds no row."""
    names = [parameter.name for parameter in parameters if parameter.shape.numel()]
    names += [name for name, buffer in persistent_buffers(model).items() if buffer.numel()]
    return {f"model.{_plain(name)}" for name in names}


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that belong to a model's state, by fully qualified name."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }


def _leaders(model: nn.Module) -> dict[str, str]:
    """For each buffer of a module with parameters, the name of the first of these."""
    leaders = {}
    for prefix, module in model.named_modules():
        path = f"{prefix}." if prefix else ""
        first = next((name for name, _ in module.named_parameters(recurse=False)), None)
        if first is not None:
            for name, _ in module.named_buffers(recurse=False):
                leaders[path + name] = _plain(path + first)
    return leaders


def optimizer_entries(
    optimizer: torch.optim.Optimizer, parameters: Sequence[ShardedParameter]
) -> list[Entry]:
    """Every state of every parameter of which this rank holds rows.

    A scalar has no dimension, every other state has one row for each row of the parameter; who
    writes a parameter's first row writes its scalars. Raises WorkError for a state of
    another form.
    """
    return state_entries(optimizer.state, parameters)


def state_entries(
    states: Mapping[torch.Tensor, Mapping[str, object]], parameters: Sequence[ShardedParameter]
) -> list[Entry]:
    """``optimizer_entries`` of states by ``local``."""
    entries = []
    for index, parameter in enumerate(parameters):
        if not parameter.local.numel():
            continue
        rows = share_of(index, parameter)
        for name, value in sorted(states.get(parameter.local, {}).items()):
            entries.append(_state_entry(parameter, name, value, rows))
    return entries


def stateless_names(
    optimizer: torch.optim.Optimizer, parameters: Sequence[ShardedParameter]
) -> frozenset[str]:
    """Parameters that the optimizer holds without any state.

    Only those for whose first rows this rank stands. State appears with the first gradient, so that
    a frozen or unused parameter has none.
    """
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    return frozenset(
        _plain(parameter.name)
        for parameter in parameters
        if _holds_first_row(parameter)
        and parameter.local in held
        and not optimizer.state.get(parameter.local)
    )


def optimizer_name(parameter: ShardedParameter) -> str:
    """A parameter's part of the keys of its optimizer state."""
    return _plain(parameter.name)


def rng_entries(rng: Mapping[str, torch.Tensor], rank: int) -> list[Entry]:
    """Generator states of one rank, by device."""
    return [
        Entry(
            path=("rng", str(rank), device),
            shape=state.shape,
            row_start=0,
            local=state,
        )
        for device, state in sorted(rng.items())
    ]


def _state_entry(parameter: ShardedParameter, name: str, value: object, share: slice) -> Entry:
    path = ("optimizer", _plain(parameter.name), name)
    if not isinstance(value, torch.Tensor):
        raise WorkError(
            f"{'.'.join(path)} is a {type(value).__name__}: only tensors can be checkpointed."
        )
    if value.ndim == 0:
        return Entry(
            path=path,
            shape=torch.Size(),
            row_start=0,
            local=value.detach(),
            rows=share if parameter.row_start + share.start == 0 else _NO_ROWS,
        )
    rows = parameter.local.shape[0]
    if value.shape[0] != rows:
        raise WorkError(
            f"{'.'.join(path)} has {value.shape[0]} rows where its parameter has {rows}: only "
            "scalars and states with one row for each row of the parameter can be checkpointed."
        )
    return Entry(
        path=path,
        shape=torch.Size([parameter.shape[0], *value.shape[1:]]),
        row_start=parameter.row_start,
        local=value.detach(),
        rows=share,
    )


def share_of(index: int, parameter: ShardedParameter) -> slice:
    """Which of a parameter's rows here this rank writes: replicas divide the work.

    Large parameters are divided by rows and small ones dealt out in turn, the ``index``-th of the
    model to whoever's turn it is, so that no replica has much more than its part and nothing is in
    crumbs.
    """
    num_rows = parameter.local.shape[0] if parameter.shape else 1
    if parameter.num_replicas == 1:
        return slice(0, num_rows) if parameter.primary else _NO_ROWS
    if parameter.local.nbytes >= DIVIDED_BYTES and num_rows >= parameter.num_replicas:
        start = num_rows * parameter.replica // parameter.num_replicas
        return slice(start, num_rows * (parameter.replica + 1) // parameter.num_replicas)
    its_turn = index % parameter.num_replicas == parameter.replica
    return slice(0, num_rows) if its_turn else _NO_ROWS


def _holds_first_row(parameter: ShardedParameter) -> bool:
    return parameter.primary and parameter.row_start == 0 and bool(parameter.local.numel())


def _plain(name: str) -> str:
    return name.replace(COMPILED_PREFIX, "")
