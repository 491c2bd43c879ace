"""What a run is refused for before any work starts, one rule a function.

A rule looks at the configuration, the machine and the model, and yields what is wrong. All rules
are asked, so that the user hears everything at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from shoal.config import AxisLevels, Config
from shoal.data import check_vocabulary, load_tokenizer, plan_sources, tokenizer_name
from shoal.errors import ConfigError, ConfigErrors
from shoal.fsdp import placements_for
from shoal.models import DecoderConfig, HFWeights
from shoal.parallel.context import SequenceCut, check_dropout
from shoal.parallel.expert import check_expert_degree
from shoal.parallel.pipeline import Stages
from shoal.plan.batches import Batches
from shoal.plan.machine import Machine
from shoal.plan.model import read_decoder_config
from shoal.plan.mxfp8 import mxfp8_parameters
from shoal.plan.precision import resolve_device, resolve_precision
from shoal.plan.rates import Rates
from shoal.storage import damages, location_of
from shoal.topology import Topology

T = TypeVar("T")

RESUME_WORDS = ("auto", "never")
"""Values of ``checkpoint.resume`` that are no path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the rules look at."""

    config: Config
    machine: Machine

    decoder: DecoderConfig | None
    """The model; ``None`` where it cannot be read, which is a refusal of its own."""

    topology: Topology | None
    """The ranks; ``None`` where the degrees do not fit together, a refusal of its own."""


def check(config: Config, machine: Machine) -> tuple[DecoderConfig, Topology]:
    """The model and the ranks of a run that nothing speaks against.

    Raises:
        ConfigError: with every refusal.
    """
    found: list[ConfigError] = []
    decoder = _kept(lambda: read_decoder_config(config.model), found)
    topology = _kept(lambda: topology_of(config), found)
    facts = Facts(config=config, machine=machine, decoder=decoder, topology=topology)
    for rule in RULES:
        found.extend(rule(facts))
    ConfigErrors.raise_any(found)
    assert decoder is not None and topology is not None
    return decoder, topology


def check_layout(config: Config) -> tuple[DecoderConfig, Topology]:
    """The model and the ranks of a run, whatever data and machine it may get.

    Raises:
        ConfigError: with every reason for which there are no such ranks.
    """
    found: list[ConfigError] = []
    decoder = _kept(lambda: read_decoder_config(config.model), found)
    topology = _kept(lambda: topology_of(config), found)
    facts = Facts(config=config, machine=Machine.here(), decoder=decoder, topology=topology)
    for rule in (_tensor, _experts, _pipeline, _levels):
        found.extend(rule(facts))
    ConfigErrors.raise_any(found)
    assert decoder is not None and topology is not None
    return decoder, topology


def topology_of(config: Config) -> Topology:
    """The ranks that ``cluster`` and ``parallel`` describe; raises ``ConfigError``."""
    return Topology(
        world_size=config.cluster.workers,
        nvlink_domain=config.cluster.nvlink_domain,
        pipeline=config.parallel.pipeline,
        context=config.parallel.context,
        expert=config.parallel.expert,
    )


def stages_of(config: Config) -> Stages:
    """The pipeline that ``parallel`` describes."""
    parallel = config.parallel
    return Stages(num_stages=parallel.pipeline, virtual=parallel.virtual_stages)


def _tensor(facts: Facts) -> Iterator[ConfigError]:
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


def _experts(facts: Facts) -> Iterator[ConfigError]:
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


def _pipeline(facts: Facts) -> Iterator[ConfigError]:
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


def _levels(facts: Facts) -> Iterator[ConfigError]:
    sharding = facts.config.sharding
    kinds: dict[str, AxisLevels] = {"dense": sharding.dense, "expert": sharding.expert}
    for kind, levels in kinds.items():
        try:
            placements_for(levels.outer, levels.inner)
        except ConfigError as error:
            field = f"sharding.{kind}.outer"
            yield ConfigError(field, levels.outer.value, error.problem, error.remedy)


def _batch(facts: Facts) -> Iterator[ConfigError]:
    if facts.topology is not None:
        try:
            Batches.of(facts.config, facts.topology)
        except ConfigError as error:
            yield error


def _context(facts: Facts) -> Iterator[ConfigError]:
    decoder, length = facts.decoder, facts.config.data.seq_len
    if decoder is not None and length > decoder.max_position_embeddings:
        longest = decoder.max_position_embeddings
        problem = f"the model knows positions up to {longest} (max_position_embeddings)"
        yield ConfigError("data.seq_len", length, problem, f"Use at most {longest}")


def _shared_sequences(facts: Facts) -> Iterator[ConfigError]:
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


def _data(facts: Facts) -> Iterator[ConfigError]:
    name = tokenizer_name(facts.config.data.tokenizer, facts.config.model.path)
    found: list[ConfigError] = []
    tokenizer = _kept(lambda: load_tokenizer(name), found)
    if tokenizer is not None:
        decoder = facts.decoder
        if decoder is not None:
            _kept(lambda: check_vocabulary(tokenizer, decoder.vocab_size), found)
        _kept(lambda: plan_sources(facts.config.data, tokenizer), found)
    yield from found


def _weights(facts: Facts) -> Iterator[ConfigError]:
    folder = facts.config.model.path
    if folder is not None and facts.decoder is not None:
        try:
            HFWeights(Path(folder), facts.decoder)  # reads no more than names and shapes
        except ConfigError as error:
            yield error


def _device(facts: Facts) -> Iterator[ConfigError]:
    try:
        device = resolve_device(facts.config, facts.machine)
    except ConfigError as error:
        yield error
        return
    if facts.config.train.cuda_graph:
        problem = "the capture of a whole iteration is not built in this version"
        if device == "cpu":
            problem = "there are no CUDA graphs on a CPU"
        yield ConfigError("train.cuda_graph", True, problem, "Set it to false")


def _precision(facts: Facts) -> Iterator[ConfigError]:
    try:
        resolve_precision(facts.config, facts.machine)
    except ConfigError as error:
        if error.field.startswith("precision."):  # a wrong device is another rule's
            yield error


def _kept_in_bf16(facts: Facts) -> Iterator[ConfigError]:
    if facts.decoder is not None:
        try:
            mxfp8_parameters(facts.config, facts.decoder)
        except ConfigError as error:
            yield error


def _optimizer(facts: Facts) -> Iterator[ConfigError]:
    optimizer, moments = facts.config.optimizer, facts.config.precision.moments
    if optimizer.kind == "sgd" and moments != "fp32":
        problem = "SGD keeps its momentum in the format of the main weights"
        remedy = "Leave it out, or set precision.main_weights"
        yield ConfigError("precision.moments", moments, problem, remedy)


def _expert_bias(facts: Facts) -> Iterator[ConfigError]:
    rate, decoder = facts.config.optimizer.expert_bias_rate, facts.decoder
    if rate is None or decoder is None:
        return
    if decoder.experts is None or not decoder.experts.selection_bias:
        problem = f"no bias takes part in choosing experts of this {decoder.model_type} model"
        remedy = "Leave it out; model.config.router_aux_loss_coef balances by a loss"
        remedy = "Leave it out" if decoder.experts is None else remedy
        yield ConfigError("optimizer.expert_bias_rate", rate, problem, remedy)


def _resume(facts: Facts) -> Iterator[ConfigError]:
    resume = facts.config.checkpoint.resume
    if resume in RESUME_WORDS:
        return
    remedy = "Give the folder of a complete step, such as runs/run/checkpoints/step-00000010"
    try:
        location = location_of(resume, "checkpoint.resume")
    except ConfigError as error:
        yield error
        return
    if isinstance(location, Path) and not location.is_dir():
        problem = "is neither auto nor never, and there is no such folder"
        yield ConfigError("checkpoint.resume", resume, problem, remedy)
    elif found := damages(location):
        problem = f"it is no complete checkpoint: {found[0]}"
        yield ConfigError("checkpoint.resume", resume, problem, remedy)


RULES: tuple[Callable[[Facts], Iterator[ConfigError]], ...] = (
    _tensor,
    _pipeline,
    _experts,
    _levels,
    _batch,
    _context,
    _shared_sequences,
    _data,
    _weights,
    _device,
    _precision,
    _kept_in_bf16,
    _optimizer,
    _expert_bias,
    _resume,
)
"""Every rule besides those of the model's config and of the topology."""


def _kept(make: Callable[[], T], found: list[ConfigError]) -> T | None:
    try:
        return make()
    except ConfigErrors as error:
        found.extend(error.problems)
    except ConfigError as error:
        found.append(error)
    return None


def check_domain(config: Config, rates: Rates) -> None:
    """Raise ``ConfigError`` where a domain of fast links would have more ranks than it can."""
    domain = config.cluster.nvlink_domain or config.cluster.workers
    if rates.domain is not None and domain > rates.domain:
        raise ConfigError(
            "cluster.nvlink_domain",
            config.cluster.nvlink_domain,
            f"{domain} ranks would share fast links, which join {rates.domain} of {rates.name}",
            f"Use a divisor of {config.cluster.workers} that is at most {rates.domain}",
        )
