"""What layouts are refused for, one rule a function."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.config import AxisLevels
from shoal.errors import ConfigError
from shoal.fsdp import placements_for
from shoal.parallel.context import SequenceCut, check_dropout
from shoal.parallel.expert import check_expert_degree
from shoal.plan.batches import Batches
from shoal.plan.facts import Facts, stages_of


def tensor(facts: Facts) -> Iterator[ConfigError]:
    """Tensor parallelism, which training does without."""
    for name in ("tensor", "expert_tensor"):
        degree = getattr(facts.config.parallel, name)
        if degree != 1:
            problem = (
                "training shards whole rows of parameters over the ranks instead of splitting "
                "matrix products, which would leave each GPU small products and an exchange "
                "inside every layer"
            )
            remedy = "Set it to 1; sharding.*.inner = parameters saves the same memory"
            yield ConfigError(f"parallel.{name}", degree, problem, remedy)


def experts(facts: Facts) -> Iterator[ConfigError]:
    """Experts that ranks share."""
    degree = facts.config.parallel.expert
    if facts.decoder is None or degree == 1:
        return
    experts = facts.decoder.experts
    if experts is None:
        problem = f"no layer of this {facts.decoder.model_type} model has experts to share"
        yield ConfigError("parallel.expert", degree, problem, "Set it to 1")
        return
    try:
        check_expert_degree(experts.num_experts, degree)
    except ConfigError as error:
        yield error


def pipeline(facts: Facts) -> Iterator[ConfigError]:
    """Stages, and runs of layers on each."""
    parallel, decoder = facts.config.parallel, facts.decoder
    if parallel.virtual_stages > 1 and parallel.pipeline == 1:
        problem = "with one pipeline stage there is nothing to interleave"
        remedy = "Set it to 1, or parallel.pipeline to 2 or more"
        yield ConfigError("parallel.virtual_stages", parallel.virtual_stages, problem, remedy)
        return
    if decoder is None or stages_of(facts.config).num_chunks <= decoder.num_layers:
        return
    layers = decoder.num_layers
    if parallel.pipeline > layers:
        problem = f"the model's {layers} layers are fewer than the stages"
        yield ConfigError("parallel.pipeline", parallel.pipeline, problem, f"Use at most {layers}")
    else:
        problem = (
            f"{parallel.pipeline} stages of {parallel.virtual_stages} runs of layers are more runs "
            f"than the model's {layers} layers"
        )
        remedy = f"Use at most {layers // parallel.pipeline}"
        yield ConfigError("parallel.virtual_stages", parallel.virtual_stages, problem, remedy)


def levels(facts: Facts) -> Iterator[ConfigError]:
    """Levels of sharding that go together."""
    sharding = facts.config.sharding
    kinds: dict[str, AxisLevels] = {"dense": sharding.dense, "expert": sharding.expert}
    for kind, levels in kinds.items():
        try:
            placements_for(levels.outer, levels.inner)
        except ConfigError as error:
            field = f"sharding.{kind}.outer"
            yield ConfigError(field, levels.outer.value, error.problem, error.remedy)


def batch(facts: Facts) -> Iterator[ConfigError]:
    """A global batch that divides."""
    if facts.topology is not None:
        try:
            Batches.of(facts.config, facts.topology)
        except ConfigError as error:
            yield error


def shared_sequences(facts: Facts) -> Iterator[ConfigError]:
    """Sequences that ranks share."""
    size = facts.config.parallel.context
    if size == 1:
        return
    try:
        SequenceCut(length=facts.config.data.seq_len, size=size)
    except ConfigError as error:
        yield error
    if facts.decoder is not None:
        try:
            check_dropout(facts.decoder.attention_dropout)
        except ConfigError as error:
            yield error
