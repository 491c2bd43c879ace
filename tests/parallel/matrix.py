"""Layouts as data, the step that their ranks take, and the one process that they are held against.

A cell is one composition. Its sequences differ from rank to rank, also in how many labels they
have: the second of a step has none. Sizes divide by nothing: 257 entries, 66 elements, odd lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from shoal.config import Config, config_from_tree
from shoal.data import IGNORED, Batch
from shoal.fsdp import Ledger, sharded_parameters
from shoal.models import Decoder, DecoderConfig, Router, initialize
from shoal.plan import resolve_precision, topology_of
from shoal.training import (
    StepMetrics,
    Stepper,
    build_model,
    build_sharded_optimizer,
    fill_model,
)
from tests.plan.measured import Measured, bytes_by_kind, calls_of
from tests.training.tiny import MIXTURE, MODEL, part_of

NUM_STEPS, SEED = 3, 7
RATES: dict[str, dict[str, Any]] = {"sgd": {"lr": 0.1}, "adamw": {"lr": 0.01, "eps": 0.01}}
"""Of AdamW an eps so large that a gradient near zero does not become a step of random sign."""

LEVELS = {"R": "replicate", "O": "optimizer", "G": "gradients", "P": "parameters"}
PAIRS = ["RR", "RO", "RG", "RP", "OO", "OG", "OP", "GG", "GP", "PP"]
"""Every pair of levels, outer then inner: RR is DDP, OO, GG, PP are ZeRO-1 to 3, RP is HSDP, OP is
HFSDP."""

_WIDE: dict[str, Any] = {"initializer_range": 0.1, "max_position_embeddings": 300}
"""So large that no matrix learns so little that rounding covers it."""
_DENSE, _EXPERTS = {**MODEL, **_WIDE}, {**MIXTURE, **_WIDE, "num_experts": 8}

MODELS: dict[str, dict[str, Any]] = {
    "dense": _DENSE,
    "untied": {**_DENSE, "tie_word_embeddings": False},
    "window": {**_DENSE, "model_type": "mistral", "sliding_window": 6},
    "packed": _DENSE,
    "mixture": _EXPERTS,
    # layers without experts, also at the ends of a pipeline
    "mixed": {**_EXPERTS, "mlp_only_layers": [0, 3], "tie_word_embeddings": False},
    # as many as three and six ranks can share
    "six": {**_EXPERTS, "num_experts": 6, "mlp_only_layers": [0]},
    # an expert that every token visits, and biases
    "shared": {
        **_EXPERTS,
        "model_type": "qwen2_moe",
        "shared_expert_intermediate_size": 34,
        "norm_topk_prob": True,
    },
    # experts chosen with a bias, which every step changes; the first layer has none
    "biased": {
        **_DENSE,
        "model_type": "dots1",
        "sliding_window": None,
        "moe_intermediate_size": 30,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
    },
}
SPARSE = ("mixture", "mixed", "six", "shared", "biased")
BIAS_RATE = 0.05
"""So large that a step's updates change what the next one chooses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One composition."""

    ranks: int
    domain: int | None = None
    pipeline: int = 1
    virtual: int = 1
    context: int = 1
    exchange: str = "gather"
    expert: int = 1

    dense: str = "RP"
    experts: str = "RP"
    """Levels, outer then inner, by their first letters."""

    model: str = "dense"
    length: int = 17
    micro_batch: int = 1
    microbatches: int = 2
    recompute: str = "none"
    clip: float | None = None
    optimizer: str = "sgd"
    """Plain in most cells: clipping and AdamW hide a constant factor."""

    def __str__(self) -> str:
        words = [f"{self.ranks}"]
        words += [f"domain {self.domain}"] if self.domain else []
        words += [f"pp{self.pipeline}x{self.virtual}"] if self.pipeline > 1 else []
        words += [f"cp{self.context} {self.exchange}"] if self.context > 1 else []
        words += [f"ep{self.expert}"] if self.expert > 1 else []
        words += [self.dense, self.experts] if self.model in SPARSE else [self.dense]
        words += [self.model, f"{self.microbatches}x{self.micro_batch}x{self.length}"]
        words += ["recompute"] if self.recompute == "layer" else []
        words += ["clip"] if self.clip else []
        words += [self.optimizer] if self.optimizer != "sgd" else []
        return "-".join(words)

    @property
    def num_layers(self) -> int:
        """So many that stages have unequal numbers of them."""
        return 2 if self.pipeline == 1 else max(5, self.pipeline * self.virtual + 1)

    @property
    def decoder(self) -> dict[str, Any]:
        """The model's Hugging Face config."""
        return {**MODELS[self.model], "num_hidden_layers": self.num_layers}

    @property
    def data(self) -> int:
        """Ranks with different sequences."""
        return self.ranks // (self.pipeline * self.context)

    @property
    def num_sequences(self) -> int:
        """Sequences of a step."""
        return self.data * self.micro_batch * self.microbatches

    @property
    def settings(self) -> Config:
        """Of the run."""
        return config_from_tree(
            {
                "run": {"seed": SEED},
                "model": {"config": self.decoder},
                "data": {"sources": [{"path": __file__}], "seq_len": self.length},
                "cluster": {
                    "workers": self.ranks,
                    "device": "cpu",
                    "nvlink_domain": self.domain,
                },
                "parallel": {
                    "pipeline": self.pipeline,
                    "virtual_stages": self.virtual,
                    "context": self.context,
                    "context_exchange": self.exchange if self.context > 1 else "gather",
                    "expert": self.expert,
                },
                "sharding": {
                    kind: {"outer": LEVELS[pair[0]], "inner": LEVELS[pair[1]]}
                    for kind, pair in (("dense", self.dense), ("expert", self.experts))
                },
                "precision": {"compute": "fp32"},
                "optimizer": {
                    "kind": self.optimizer,
                    "clip": self.clip,
                    "expert_bias_rate": BIAS_RATE if self.model == "biased" else None,
                    **RATES[self.optimizer],
                },
                "train": {
                    "steps": NUM_STEPS,
                    "global_batch": self.num_sequences,
                    "micro_batch": self.micro_batch,
                    "recompute": self.recompute,
                },
            }
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """Rows of a parameter on one rank, after the last step."""

    name: str
    row_start: int
    change: torch.Tensor
    is_primary: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What one rank did."""

    steps: list[StepMetrics]
    measured: list[Measured]
    """Collectives of each step, and bytes at rest after it."""
    held: list[Held]
    biases: dict[str, torch.Tensor]
    """That choose experts, after the last step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """What one process does."""

    losses: list[float]
    auxiliary: list[float | None]
    norms: list[float]
    weights: dict[str, torch.Tensor]
    changes: dict[str, torch.Tensor]
    biases: dict[str, torch.Tensor]


def sequences(model: str, length: int, count: int, step: int) -> Batch:
    """All sequences of a step; a rank's are some rows of them."""
    draw = torch.Generator().manual_seed(1000 * length + step)
    tokens = torch.randint(0, 257, (count, length), generator=draw)
    labels = torch.randint(0, 257, (count, length), generator=draw)
    for row in range(count):
        labels[row, length if row % 3 == 0 else row % length :] = IGNORED
    if count > 1:
        labels[1] = IGNORED
    documents = torch.zeros_like(tokens)
    if model == "packed":
        starts = torch.rand((count, length), generator=draw) < 4 / length
        starts[:, 0] = False
        starts[0] = False  # this sequence is one document
        documents = starts.long().cumsum(dim=1)
    index = torch.arange(length).expand(count, length)
    first = torch.ones_like(documents, dtype=torch.bool)
    first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    positions = index - torch.where(first, index, 0).cummax(dim=1).values
    return Batch(tokens=tokens, labels=labels, positions=positions, documents=documents)


@cache
def expected(
    model: str,
    num_layers: int,
    length: int,
    count: int,
    clip: float | None = None,
    kind: str = "sgd",
) -> Expected:
    """One plain process that sees all sequences of a step at once."""
    hf = {**MODELS[model], "num_hidden_layers": num_layers}
    decoder = Decoder(DecoderConfig.from_hf(hf), torch.float32)
    initialize(decoder, SEED)
    before = {name: value.detach().clone() for name, value in decoder.named_parameters()}
    experts = decoder.config.experts
    parameters = list(decoder.parameters())
    optimizer = (
        torch.optim.SGD(parameters, **RATES[kind])
        if kind == "sgd"
        else torch.optim.AdamW(parameters, betas=(0.9, 0.95), weight_decay=0.0, **RATES[kind])
    )
    biases, chosen = dict(decoder.named_buffers()), _choices(decoder)
    losses, auxiliary, norms = [], [], []
    for step in range(NUM_STEPS):
        batch = sequences(model, length, count, step)
        output = decoder(
            batch.tokens,
            positions=batch.positions,
            documents=batch.documents,
            labels=batch.labels,
        )
        total = mean = output.loss_sum / max(int((batch.labels != IGNORED).sum()), 1)
        if experts is not None:
            total = mean + experts.balance_coefficient * output.auxiliary / count
        decoder.zero_grad()
        total.backward()
        gradients = [p.grad for p in parameters if p.grad is not None]
        squares = [gradient.double().square().sum() for gradient in gradients]
        norm = torch.stack(squares).sum().sqrt().item()
        if clip is not None:
            for gradient in gradients:
                gradient.mul_(min(clip / (norm + 1e-6), 1.0))
        optimizer.step()
        for name, bias in biases.items():
            tokens = chosen[name].flatten().bincount(minlength=len(bias)).double()
            bias.add_(BIAS_RATE * (tokens.mean() - tokens).sign().float())
        losses.append(mean.item())
        auxiliary.append(None if experts is None else output.auxiliary.item() / count)
        norms.append(norm)
    weights = {name: value.detach() for name, value in decoder.named_parameters()}
    changes = {name: value - before[name] for name, value in weights.items()}
    return Expected(
        losses=losses,
        auxiliary=auxiliary,
        norms=norms,
        weights=weights,
        changes=changes,
        biases=biases,
    )


def _choices(decoder: Decoder) -> dict[str, torch.Tensor]:
    """Filled by each forward: what experts its tokens chose, by the names of the layers' biases."""
    chosen: dict[str, torch.Tensor] = {}

    def note(name: str) -> Callable[..., None]:
        return lambda router, given, made: chosen.update({name: made[1]})

    for name, module in decoder.named_modules():
        if isinstance(module, Router):
            module.register_forward_hook(note(f"{name}.e_score_correction_bias"))
    return chosen


def train(cell: Cell) -> Outcome:
    """The steps of a cell on this rank."""
    settings = cell.settings
    topology, precision, ledger = topology_of(settings), resolve_precision(settings), Ledger()
    passes = build_model(settings, precision, torch.device("cpu"), ledger=ledger)
    fill_model(passes.model, settings)
    before = [parameter.local.detach().clone() for parameter in sharded_parameters(passes.model)]
    optimizer = build_sharded_optimizer(settings, passes.model, precision)
    stepper = Stepper(
        passes,
        optimizer,
        settings=settings.optimizer,
        num_steps=NUM_STEPS,
        readers=topology.pipeline * topology.context,
    )
    share = cell.micro_batch * cell.microbatches
    first = topology.coordinates(dist.get_rank()).data * share

    def microbatches(step: int) -> Iterator[Batch]:
        batch = sequences(cell.model, cell.length, cell.num_sequences, step)
        for start in range(first, first + share, cell.micro_batch):
            yield part_of(batch, start, start + cell.micro_batch)

    steps, measured = [], []
    for step in range(NUM_STEPS):
        ledger.clear()
        steps.append(stepper.step(step, microbatches(step)))
        measured.append(Measured(bytes_by_kind(passes.model, optimizer), calls_of(ledger), 0))
    held = [
        Held(
            name=parameter.name,
            row_start=parameter.row_start,
            change=parameter.local.detach() - old,
            is_primary=parameter.primary,
        )
        for parameter, old in zip(sharded_parameters(passes.model), before, strict=True)
    ]
    biases = dict(passes.model.named_buffers())
    return Outcome(steps=steps, measured=measured, held=held, biases=biases)
