"""Sharding of modules in place: the adapter's front door.

    with fully_shard_context(device) as context:
        for layer in model.layers:
            fully_shard(layer, mesh, placements_for(outer, inner))
        fully_shard(model, mesh, placements_for(outer, inner))

Inner modules first, the outermost last. After the block the model is called as before. Its
parameters are this rank's rows of the main weights; any torch optimizer can update them once
``fully_shard_optimizer`` was called on it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from shoal.errors import ConfigError, WorkError
from shoal.fsdp.communicator import Communicator
from shoal.fsdp.grid import Grid
from shoal.fsdp.group import ParameterGroup
from shoal.fsdp.memory import LocalMemory
from shoal.fsdp.module import convert, schedule_of
from shoal.fsdp.ownership import owned_parameters, partition
from shoal.fsdp.placement import Placements
from shoal.fsdp.precision import MixedPrecision
from shoal.fsdp.schedule import Schedule
from shoal.fsdp.share import Share
from shoal.fsdp.transport import communicator_for
from shoal.fsdp.unit import Unit, unit_of

CommunicatorFactory = Callable[[ProcessGroup, torch.device], Communicator]


class _Construction:
    """What one ``fully_shard_context`` has made so far."""

    def __init__(self, schedule: Schedule, communicators: CommunicatorFactory) -> None:
        self.schedule = schedule
        self._factory = communicators
        self._communicators: dict[tuple[DeviceMesh, int], Communicator] = {}

    def grid(self, mesh: DeviceMesh, placements: Placements) -> Grid:
        """The communicators of ``mesh``, made once for each of its axes."""
        device = self.schedule.device
        if mesh.device_type != device.type:
            raise ConfigError(
                "mesh", mesh.device_type, f"the context is on {device.type}", "Use one device type"
            )
        dims = placements.dims(mesh)
        for dim in dims:
            if (mesh, dim) not in self._communicators:
                group = mesh.get_group(dim)
                self._communicators[mesh, dim] = self._factory(group, device)
        return Grid(
            communicators=tuple(self._communicators[mesh, dim] for dim in dims),
            members=frozenset(mesh.mesh.flatten().tolist()),
            device=device,
            local=LocalMemory(device),
        )


_construction: ContextVar[_Construction | None] = ContextVar("construction", default=None)


@contextmanager
def fully_shard_context(
    device: torch.device | str,
    *,
    overlap: bool = True,
    communicators: CommunicatorFactory = communicator_for,
) -> Iterator[Schedule]:
    """The scope in which the modules of one model are sharded.

    At its end the orders of forward and backward are fixed and modules may run; after an exception
    they may not. The yielded schedule serves ``microbatch``.

    Args:
        device: Where buffers live.
        overlap: Gather one unit ahead and reduce behind backward; without it at most two full-size
            buffers of a unit exist at a time instead of four, and nothing hides the collectives.
        communicators: Makes the communicator of a mesh axis.

    Raises:
        WorkError: inside another such scope.
    """
    if _construction.get() is not None:
        raise WorkError("fully_shard_context cannot be entered inside itself.")
    schedule = Schedule(torch.device(device), overlap=overlap)
    token = _construction.set(_Construction(schedule, communicators))
    try:
        yield schedule
    finally:
        _construction.reset(token)
    schedule.finalize()


def fully_shard(
    module: nn.Module,
    mesh: DeviceMesh,
    placements: Placements,
    *,
    precision: MixedPrecision | None = None,
    grad_divisor: float = 1.0,
    share: Share | None = None,
    copies: Collection[nn.Parameter] = (),
    quantized: Collection[nn.Parameter] = (),
    recomputed: bool = False,
) -> None:
    """Shard, in place, the parameters beneath ``module`` that no inner unit owns.

    Parameters on the meta device get buffers without values: fill ``local`` of each of
    ``sharded_parameters`` and call ``sync_weights``. All ranks must hold the same initial values.

    Args:
        module: Becomes a unit: gathered when called, let go afterwards.
        mesh: The data-parallel ranks that hold this module, one dimension per placement axis.
        placements: Where parameters, gradients and optimizer state live; ``placements_for``.
        precision: Formats of the buffers; fp32 main weights and gradients by default.
        grad_divisor: Gradients are averaged over the ranks of ``mesh`` and divided by this; the
            size of the expert axis for experts, whose gradients sum over the tokens of its ranks.
        share: Which rows of whole parameters these are, where other ranks hold the others; whoever
            saves or loads them sees whole parameters and this rank's rows of them.
        copies: Parameters beneath ``module`` that the ranks of another mesh hold as well, and stand
            for: here they count in no norm and are nobody's primary. They get buffers of their own,
            laid out like those of a unit that holds nothing else. Whoever holds both sides adds
            their gradients up.
        quantized: Matrices that travel in MXFP8, for products that quantize along the dimension
            which they sum over (``shoal.ops.mxfp8_linear``): both sizes multiples of 32, bf16 in
            compute, on CPUs.
        recomputed: Whether backward computes the module's forward again; matters to those alone.

    Raises:
        ConfigError: where module, mesh, placements or divisor do not fit each other.
        WorkError: outside ``fully_shard_context``.
    """
    construction = _construction.get()
    if construction is None:
        raise WorkError("fully_shard works inside `with fully_shard_context(device):` only.")
    _check_module(module, construction.schedule)
    if not grad_divisor > 0:
        raise ConfigError("grad_divisor", grad_divisor, "it must be above zero", "Use 1 or more")
    grid = construction.grid(mesh, placements)
    groups = [
        ParameterGroup(
            slots,
            grid=grid,
            placements=placements,
            precision=precision or MixedPrecision(),
            grad_divisor=grad_divisor,
            lanes=construction.schedule.lanes,
            share=share or Share(),
            is_copy=_is_among(slots[0][0].parameter, copies),
            is_quantized=_is_among(slots[0][0].parameter, quantized),
        )
        for slots in partition(owned_parameters(module), copies, quantized)
    ]
    unit = Unit(module, groups, recomputed=recomputed)
    construction.schedule.register(unit)
    convert(module, unit, construction.schedule)


def _is_among(parameter: nn.Parameter, others: Collection[nn.Parameter]) -> bool:
    return any(parameter is other for other in others)


def _check_module(module: nn.Module, schedule: Schedule) -> None:
    for name, inner in module.named_modules():
        if unit_of(inner) is None:
            continue
        if inner is module:
            raise ConfigError(
                "module", type(module).__name__, "it is sharded already", "Shard it once"
            )
        if schedule_of(inner) is not schedule:
            raise ConfigError(
                f"module {name}",
                type(inner).__name__,
                "it was sharded in another fully_shard_context",
                "Shard a model in one context",
            )


@contextmanager
def microbatch(context: Schedule, *, is_last: bool) -> Iterator[None]:
    """Say whether the backward inside is the step's last, after which gradients must be final."""
    before = context.is_last
    context.is_last = is_last
    try:
        yield
    finally:
        context.is_last = before
