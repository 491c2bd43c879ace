"""A plan as a few sheets of text: what tables and plain text are made from."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.plan.links import LinkClass, link_of
from shoal.plan.memory import AT_REST, IN_A_STEP, Kind
from shoal.plan.plan import Plan
from shoal.plan.saves import Saves
from shoal.plan.sheet import MOST_ROWS, Sheet, bytes_text, seconds_text
from shoal.topology import Axis

LINKS: tuple[LinkClass, LinkClass] = ("inside", "outside")

_PARTS = {
    "dense": "projections and dense MLPs",
    "attention": "attention",
    "experts": "routed experts",
    "head": "head and loss",
    "again": "computing layers again",
    "exchange": "waiting for keys, values and tokens",
    "weights": "waiting for weights",
    "gradients": "waiting for gradients",
    "bubble": "waiting for other stages",
    "messages": "messages between stages",
    "update": "optimizer",
}


def sheets(plan: Plan) -> Iterator[Sheet]:
    """Every sheet, in the order in which they are read."""
    yield _run(plan)
    yield _mesh(plan)
    if len(plan.layers) > 1:
        yield _stages(plan)
    yield _ranks(plan)
    yield memory_sheet(plan)
    if plan.saves is not None:
        yield _checkpoints(plan, plan.saves)
    yield _traffic(plan)
    if plan.time is not None:
        yield time_sheet(plan)


def _run(plan: Plan) -> Sheet:
    batches, precision = plan.batches, plan.precision
    rows = (
        ("model", f"{plan.model_type}, {plan.num_parameters:,} parameters"),
        ("workers", f"{plan.topology.world_size} on {plan.device}"),
        ("compute", f"{_dtype(precision.compute)} ({precision.reason})"),
        ("main weights", _main_weights(plan)),
        ("gradients", f"{_dtype(precision.main_gradients)}, summed in {_dtype(precision.reduce)}"),
        (
            "step",
            f"{batches.global_batch} sequences of {batches.seq_len} tokens, "
            f"{batches.num_microbatches} x {batches.micro_batch} on each data-parallel rank",
        ),
    )
    return Sheet(title=f"Run {plan.name}", header=("", ""), rows=rows, numeric=frozenset())


def _main_weights(plan: Plan) -> str:
    rounding = plan.precision.rounding
    name = _dtype(plan.precision.main_weights)
    return name if rounding == "nearest" else f"{name}, rounded stochastically"


def _mesh(plan: Plan) -> Sheet:
    topology = plan.topology
    rows = [("domains of fast links", str(topology.num_domains), f"{topology.domain} ranks each")]
    words = {
        Axis.OUTER: plan.levels["dense"].outer.value,
        Axis.INNER: plan.levels["dense"].inner.value,
        Axis.EXPERT_OUTER: plan.levels["expert"].outer.value,
        Axis.EXPERT_INNER: plan.levels["expert"].inner.value,
    }
    for axis in _axes(plan):
        name = axis.value.replace("_", " ")
        rows.append((name, str(topology.size(axis)), words.get(axis, "")))
    return Sheet(
        title="Mesh",
        header=("axis", "size", "sharded here"),
        rows=tuple(rows),
        numeric=frozenset({1}),
    )


def _stages(plan: Plan) -> Sheet:
    size, rows = plan.topology.stage, []
    for stage, runs in enumerate(plan.layers):
        ranks = range(stage * size, (stage + 1) * size)
        layers = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
        at_rest = max(plan.memory[rank].at_rest for rank in ranks)
        peak = max(plan.memory[rank].peak for rank in ranks)
        first, last = ranks[0], ranks[-1]
        names = f"{first}-{last}" if size > 1 else f"{first}"
        rows.append((str(stage), names, layers, bytes_text(at_rest), bytes_text(peak)))
    return Sheet(
        title="Pipeline stages",
        header=("stage", "ranks", "layers", "at rest", "at peak"),
        rows=tuple(rows),
        numeric=frozenset({0, 3, 4}),
        note=f"Each waits for others in {plan.bubble_share:.1%} of the step, if all layers take as "
        "long; more microbatches (train.global_batch) or parallel.virtual_stages lower it.",
    )


def _axes(plan: Plan) -> list[Axis]:
    """The axes that mean something for the model."""
    return [axis for axis in Axis if plan.has_experts or not axis.value.startswith("expert")]


def _ranks(plan: Plan) -> Sheet:
    axes = [axis for axis in _axes(plan) if plan.topology.size(axis) > 1]
    copied = plan.saves if plan.saves is not None and plan.saves.num_copies else None
    rows = []
    for memory in plan.memory[:MOST_ROWS]:
        at = plan.topology.coordinates(memory.rank)
        places = [str(at.along(axis)) for axis in axes]
        sizes = [bytes_text(memory.at_rest), bytes_text(memory.peak)]
        if copied is not None:
            sizes.append(bytes_text(copied.copy_bytes([memory.rank])))
        rows.append((str(memory.rank), str(at.domain), *places, *sizes))
    left = len(plan.memory) - len(rows)
    words = [axis.value.replace("_", " ") for axis in axes]
    header = ("rank", "domain", *words, "at rest", "at peak", *(["copies"] * bool(copied)))
    return Sheet(
        title="Ranks",
        header=header,
        rows=tuple(rows),
        numeric=frozenset(range(len(header))),
        note=f"{left} more ranks; --json lists them all" if left else "",
    )


def memory_sheet(plan: Plan) -> Sheet:
    """What the fullest rank's bytes are for."""
    fullest, rows = plan.fullest, []
    for kind in (*AT_REST, *IN_A_STEP):
        when, size = "at rest" if kind in AT_REST else "in a step", fullest.num_bytes[kind]
        if size or kind is not Kind.BUFFERS:  # which few models have
            rows.append((kind.value.replace("_", " "), when, bytes_text(size)))
    rows.append(("sum at rest", "", bytes_text(fullest.at_rest)))
    rows.append(("sum at peak", "", bytes_text(fullest.peak)))
    return Sheet(
        title=f"Memory of rank {fullest.rank}, the fullest",
        header=("kind", "when", "bytes"),
        rows=tuple(rows),
        numeric=frozenset({2}),
        note="What libraries and allocators keep for themselves comes on top.",
    )


def _checkpoints(plan: Plan, saves: Saves) -> Sheet:
    """What a save writes, and the copies that it writes from."""
    fullest = max(range(len(saves.file_bytes)), key=saves.file_bytes.__getitem__)
    rows = [
        ("a checkpoint", "in storage", bytes_text(saves.num_bytes)),
        (
            f"the file of rank {fullest}, the largest",
            "in storage",
            bytes_text(saves.file_bytes[fullest]),
        ),
    ]
    note = "Saves wait until all is written: checkpoint.asynchronous is false."
    if saves.num_copies:
        node = max(map(saves.copy_bytes, plan.domains))
        rows.append(
            (f"copies of rank {fullest}", "in memory", bytes_text(saves.copy_bytes([fullest])))
        )
        rows.append(
            (
                f"copies of the {plan.topology.domain} ranks of a domain",
                "in memory",
                bytes_text(node),
            )
        )
        note = (
            f"{saves.num_copies} copies each, in the host's memory whatever the size of /dev/shm; "
            "none with checkpoint.asynchronous=false."
        )
    return Sheet(
        title="Checkpoints",
        header=("what", "where", "bytes"),
        rows=tuple(rows),
        numeric=frozenset({2}),
        note=note,
    )


def _traffic(plan: Plan) -> Sheet:
    staged = len(plan.layers) > 1
    rows = []
    for traffic in plan.traffic:
        stream = traffic.stream
        of = stream.what if stream.axis == "pipeline" else f"{stream.layers} {stream.what}"
        row = (
            stream.operation.replace("_", "-"),
            of,
            stream.axis,
            link_of(stream, plan.topology),
            str(stream.group_size),
            str(traffic.count),
            bytes_text(traffic.payload_bytes),
            bytes_text(traffic.sent_bytes),
            stream.when,
        )
        rows.append((str(stream.stage), *row) if staged else row)
    header = ("collective", "of", "axis", "links", "ranks", "count", "payload", "sent", "when")
    numeric = range(5, 9) if staged else range(4, 8)
    return Sheet(
        title="Collectives of a step, for each rank",
        header=("stage", *header) if staged else header,
        rows=tuple(rows),
        numeric=frozenset({0, *numeric} if staged else numeric),
        note=_traffic_note(plan),
    )


def _traffic_note(plan: Plan) -> str:
    if not plan.traffic:
        return "none: no axis has more than one rank"
    sent = plan.sent
    inside, outside = (bytes_text(max(one[link] for one in sent)) for link in LINKS)
    words = f"Each rank sends up to {inside} inside its domain, {outside} out of it."
    return " ".join(filter(None, (words, _routing_note(plan))))


def _routing_note(plan: Plan) -> str:
    if any(traffic.stream.what == "tokens" for traffic in plan.traffic):
        return "Tokens as of an even routing; which experts they visit is known in the run only."
    return ""


def time_sheet(plan: Plan) -> Sheet:
    """How long a step takes, and why."""
    time, rates = plan.time, plan.rates
    assert time is not None and rates is not None
    rows = [
        (_PARTS[name], seconds_text(seconds), f"{seconds / time.total_s:.1%}")
        for name, seconds in time.parts.items()
        if seconds
    ]
    rows.append(("sum", seconds_text(time.total_s), ""))
    on = f" on stage {time.stage}, which takes longest" if plan.topology.pipeline > 1 else ""
    return Sheet(
        title=f"Time of a step{on}",
        header=("part", "seconds", "share"),
        rows=tuple(rows),
        numeric=frozenset({1, 2}),
        note=f"{time.tokens_per_s:,.0f} tokens a second, {time.flops_share:.0%} of the attainable "
        f"FLOP rate. An estimate for {rates.name}: {rates.source}.{_emulation_note(plan)}",
    )


def _emulation_note(plan: Plan) -> str:
    if not plan.precision.mxfp8:
        return ""
    return " Products in MXFP8 count as in bf16; their emulation takes several times as long."


def _dtype(dtype: object) -> str:
    return {"torch.float32": "fp32", "torch.bfloat16": "bf16"}[str(dtype)]
