"""What plans are held against: bytes and collectives of a model on this rank, as they are.

``measure`` takes a step of any configuration on this rank, ``planned_calls`` says what its plan
expects, and ``assert_as_planned`` compares the two for all ranks::

    by_rank = ranks.run(config.cluster.workers, measure, config)
    assert_as_planned(config, by_rank)
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

from shoal.config import Config
from shoal.data import Batch
from shoal.fsdp import Ledger, Transport, bytes_at_rest
from shoal.plan import Kind, Plan, make_plan
from shoal.topology import Axis, Topology
from shoal.training import Stepper, build_model, build_sharded_optimizer, fill_model

Calls = dict[tuple[str, tuple[int, ...]], tuple[int, int]]
"""Collectives by kind and ranks: how many, and bytes of their larger sides."""


def calls_of(ledger: Ledger) -> Calls:
    """Every collective that ``ledger`` recorded, but for sums of the gradient's norm, in fp64."""
    calls: Calls = {}
    for collective in ledger.collectives:
        if collective.dtype is torch.float64:
            continue
        key = (collective.operation, collective.ranks)
        count, nbytes = calls.get(key, (0, 0))
        calls[key] = (count + 1, nbytes + collective.nbytes)
    return calls


def bytes_by_kind(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes at rest after a step."""
    rest = bytes_at_rest(model)
    moments = sum(
        value.nbytes
        for state in optimizer.state.values()
        for name, value in state.items()
        if name != "step"
    )
    return {
        Kind.MAIN_WEIGHTS.value: rest.main_weights,
        Kind.COMPUTE_WEIGHTS.value: rest.compute_weights,
        Kind.GRADIENTS.value: rest.gradients,
        Kind.MOMENTS.value: moments,
        Kind.BUFFERS.value: sum(buffer.nbytes for buffer in model.buffers()),
    }


def bytes_kept(forward: Callable[[], object], parameters: Iterable[nn.Parameter]) -> int:
    """Bytes of the storages that autograd holds after ``forward``, ``parameters`` excluded."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    num_bytes = sum(storage.nbytes() for storage in kept.values())
    del result  # what it leads to stays until the bytes are counted
    return num_bytes


class Measured(NamedTuple):
    """What one rank's step did."""

    at_rest: dict[str, int]
    """Bytes by kind after the step."""

    calls: Calls

    peak_bytes: int
    """Most bytes at a time, those at rest included; 0 where nobody traced them."""


def measure(config: Config, *, trace: bool = False) -> Measured:
    """Take one step of ``config`` on this rank, of its world of ranks, with random sequences.

    ``trace`` watches the allocator in three more steps, of which the middle peak counts: a busy
    machine may keep one buffer a moment longer. Ranks talk through sockets then, whose buffers are
    all of this process.
    """
    plan = make_plan(config)
    ledger = Ledger(Transport.GLOO if trace else Transport.AUTO)
    passes = build_model(config, plan.precision, torch.device("cpu"), ledger=ledger)
    fill_model(passes.model, config)
    optimizer = build_sharded_optimizer(config, passes.model, plan.precision)
    topology = plan.topology
    stepper = Stepper(
        passes,
        optimizer,
        settings=config.optimizer,
        num_steps=1,
        readers=topology.context * topology.pipeline,
    )
    batches = batches_of(plan)
    ledger.clear()
    stepper.step(0, batches)
    calls, at_rest = calls_of(ledger), bytes_by_kind(passes.model, optimizer)
    if not trace:
        return Measured(at_rest, calls, peak_bytes=0)
    peaks = [most_allocated(lambda: stepper.step(1, batches)) for _ in range(3)]
    return Measured(at_rest, calls, sum(at_rest.values()) + sorted(peaks)[1])


def most_allocated(work: Callable[[], object]) -> int:
    """Most bytes that torch's CPU allocator had given out at a time during ``work``, beyond
    those before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    assert profiler.profiler is not None
    results = profiler.profiler.kineto_results
    assert results is not None
    events = [event for event in results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def planned_calls(plan: Plan, rank: int) -> Calls:
    """What the plan expects of a rank, by the ranks that take part."""
    counts: Counter[tuple[str, tuple[int, ...]]] = Counter()
    payloads: Counter[tuple[str, tuple[int, ...]]] = Counter()
    stage = plan.topology.coordinates(rank).pipeline
    for traffic in plan.traffic:
        stream = traffic.stream
        if stream.stage == stage:
            key = stream.operation, _members(plan.topology, stream.layers, stream.axis, rank)
            counts[key] += traffic.count
            payloads[key] += traffic.payload_bytes
    return {key: (counts[key], payloads[key]) for key in counts}


def assert_as_planned(config: Config, by_rank: Sequence[Measured]) -> None:
    """Compare bytes at rest, and counts and bytes of collectives, of every rank with its plan.

    What depends on the routing, or on which rank has the odd token, is planned as the mean of a
    stage's ranks, each kind rounded up.
    """
    plan = make_plan(config)
    sent: defaultdict[int, list[int]] = defaultdict(list)
    expected_sent: dict[int, int] = {}
    for rank, step in enumerate(by_rank):
        bytes_planned = plan.memory[rank].num_bytes
        assert {kind: bytes_planned[Kind(kind)] for kind in step.at_rest} == step.at_rest, rank
        even, (count, nbytes) = _parted(step.calls)
        planned_even, (planned_count, planned_nbytes) = _parted(planned_calls(plan, rank))
        assert even == planned_even, rank
        assert count == planned_count, rank
        stage = plan.topology.coordinates(rank).pipeline
        sent[stage].append(nbytes)
        expected_sent[stage] = planned_nbytes
    for stage, sizes in sent.items():
        rounded = expected_sent[stage] - sum(sizes) / len(sizes)
        assert 0 <= rounded <= len(plan.traffic), (stage, expected_sent[stage], sizes)


def _parted(calls: Calls) -> tuple[Calls, tuple[int, int]]:
    """What is equal on all ranks of a stage, and the number and bytes of the rest."""
    uneven = {key: call for key, call in calls.items() if key[0] in ("all_to_all", "send")}
    even = {key: call for key, call in calls.items() if key not in uneven}
    count, nbytes = (sum(call[index] for call in uneven.values()) for index in (0, 1))
    return even, (count, nbytes)


def batches_of(plan: Plan) -> list[Batch]:
    """This rank's microbatches: those of its data-parallel place."""
    place, sizes = plan.topology.coordinates(dist.get_rank()).data, plan.batches
    draw = torch.Generator().manual_seed(place)
    shape = (sizes.num_microbatches, sizes.micro_batch, sizes.seq_len)
    tokens, labels = (torch.randint(0, 257, shape, generator=draw) for _ in range(2))
    positions = torch.arange(sizes.seq_len).expand(shape)
    return [
        Batch(tokens=t, labels=label, positions=p, documents=torch.zeros_like(t))
        for t, label, p in zip(tokens, labels, positions, strict=True)
    ]


def _members(topology: Topology, layers: str, axis: str, rank: int) -> tuple[int, ...]:
    """The ranks that share a collective with ``rank``."""
    both = layers == "dense" or axis == "expert"
    view = Axis(axis if both else f"expert_{axis}")
    return next(group for group in topology.groups(view) if rank in group)
