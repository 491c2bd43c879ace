"""A plan of serving as a few sheets of text."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.errors import ConfigError
from shoal.plan.serving import ServingPlan, problems_of
from shoal.plan.sheet import Sheet, bytes_text


def serving_sheets(plan: ServingPlan) -> Iterator[Sheet]:
    """Every sheet, in the order in which they are read."""
    yield _engines(plan)
    yield _engine_memory(plan)
    yield _node_memory(plan)


def refusal_sheet(error: ConfigError) -> Sheet:
    """Why the model of a file that trains cannot be served as the file stands."""
    return Sheet(
        title="Serving would be refused",
        header=("",),
        rows=tuple((str(problem),) for problem in problems_of(error)),
        numeric=frozenset(),
    )


def _engines(plan: ServingPlan) -> Sheet:
    settings, limits = plan.settings, plan.limits
    order = "one order" if settings.batch_invariant else "torch's own products"
    rows = (
        ("model", f"{plan.model_type}, {plan.num_parameters:,} parameters"),
        ("precision", f"{plan.precision}, {order}"),
        ("engines", f"{settings.replicas}, CPU threads each: {settings.threads}"),
        ("frontends", f"{settings.num_frontends}"),
        ("CPUs", f"{settings.num_cpus}"),
        (
            "step",
            f"up to {limits.max_step_tokens} tokens of up to {limits.max_running} sequences",
        ),
    )
    return Sheet(title=f"Serving {plan.name}", header=("", ""), rows=rows, numeric=frozenset())


def _engine_memory(plan: ServingPlan) -> Sheet:
    limits = plan.limits
    pool = f"{limits.pool_tokens:,} tokens, {limits.num_blocks:,} blocks of {limits.block_size}"
    return Sheet(
        title="Memory of an engine",
        header=("kind", "what", "bytes"),
        rows=(
            ("weights", f"packed as {plan.precision}", bytes_text(plan.weight_bytes)),
            ("keys and values", pool, bytes_text(plan.kv_bytes)),
            ("sum", "", bytes_text(plan.engine_bytes)),
        ),
        numeric=frozenset({2}),
        note=f"A token's keys and values take {bytes_text(plan.token_bytes)}, a block's "
        f"{bytes_text(plan.block_bytes)}. {_longest(plan)}",
    )


def _longest(plan: ServingPlan) -> str:
    context = f"the model's {plan.limits.context_length:,} tokens"
    if plan.num_longest == 0:
        return f"No request of {context} fits: raise serve.kv.tokens."
    by_places = plan.num_longest == plan.limits.max_running
    why = ", all that serve.batch.sequences allows" if by_places else ""
    return f"Requests of {context} that fit at once: {plan.num_longest}{why}."


def _node_memory(plan: ServingPlan) -> Sheet:
    replicas = plan.settings.replicas
    processes = replicas + plan.settings.num_frontends
    return Sheet(
        title="Memory of a machine that runs them all",
        header=("kind", "what", "bytes"),
        rows=(
            ("weights", f"{replicas} x", bytes_text(replicas * plan.weight_bytes)),
            ("keys and values", f"{replicas} x", bytes_text(replicas * plan.kv_bytes)),
            ("processes", f"{processes} x, at least", bytes_text(plan.process_bytes)),
            ("sum", "", bytes_text(plan.node_bytes)),
        ),
        numeric=frozenset({2}),
        note=_free(plan),
    )


def _free(plan: ServingPlan) -> str:
    if plan.host is None:
        return "What a step computes with comes on top."
    free = bytes_text(plan.host.free_bytes)
    return f"What a step computes with comes on top. This machine has {free} free."
