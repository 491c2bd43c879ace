"""What a run is refused for before any work starts, one rule a function.

A rule looks at the configuration, the machine and the model, and yields what is wrong. All rules
are asked, so that the user hears everything at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from shoal.config import RESUME_WORDS, Config
from shoal.data import check_vocabulary, load_tokenizer, plan_sources, tokenizer_name
from shoal.errors import ConfigError, ConfigErrors
from shoal.models import DecoderConfig, HFWeights
from shoal.plan.facts import Facts, Rule, topology_of
from shoal.plan.layout_rules import batch, experts, levels, pipeline, shared_sequences, tensor
from shoal.plan.machine import Machine
from shoal.plan.model import read_decoder_config
from shoal.plan.mxfp8 import mxfp8_parameters
from shoal.plan.precision import resolve_device, resolve_precision
from shoal.plan.rates import Rates
from shoal.storage import damages, location_of
from shoal.topology import Topology

T = TypeVar("T")


def check(config: Config, machine: Machine) -> tuple[DecoderConfig, Topology]:
    """The model and the ranks of a run that nothing speaks against.

    Raises:
        ConfigError: with every refusal.
    """
    return _checked(config, machine, RULES)


def check_layout(config: Config) -> tuple[DecoderConfig, Topology]:
    """The model and the ranks of a run, whatever data and machine it may get.

    Raises:
        ConfigError: with every reason for which there are no such ranks.
    """
    return _checked(config, Machine.here(), (tensor, pipeline, experts, levels))


def _checked(
    config: Config, machine: Machine, rules: Sequence[Rule]
) -> tuple[DecoderConfig, Topology]:
    found: list[ConfigError] = []
    decoder = _kept(lambda: read_decoder_config(config.model), found)
    topology = _kept(lambda: topology_of(config), found)
    facts = Facts(config=config, machine=machine, decoder=decoder, topology=topology)
    for rule in rules:
        found.extend(rule(facts))
    ConfigErrors.raise_any(found)
    assert decoder is not None and topology is not None
    return decoder, topology


def _context(facts: Facts) -> Iterator[ConfigError]:
    decoder, length = facts.decoder, facts.config.data.seq_len
    if decoder is not None and length > decoder.max_position_embeddings:
        longest = decoder.max_position_embeddings
        problem = f"the model knows positions up to {longest} (max_position_embeddings)"
        yield ConfigError("data.seq_len", length, problem, f"Use at most {longest}")


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


RULES: tuple[Rule, ...] = (
    tensor,
    pipeline,
    experts,
    levels,
    batch,
    _context,
    shared_sequences,
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
