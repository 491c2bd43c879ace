"""Sharded decoders against plain ones: same initial bits, same losses, same weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shoal.config import Level
from shoal.errors import ConfigError
from shoal.fsdp import (
    MixedPrecision,
    fully_shard_optimizer,
    microbatch,
    placements_for,
    sharded_parameters,
)
from shoal.models import (
    Decoder,
    DecoderConfig,
    HFWeights,
    InitialWeights,
    decoder_units,
    initialize,
    load_weights,
    parameter_shapes,
    shard_decoder,
    write_hf_folder,
)
from shoal.topology import Topology
from tests.models.tiny import TINY
from tests.ranks import RankPool

STEPS, SEED, RATE = 3, 17, 0.05


def sharded(hf: dict[str, Any], outer: Level, inner: Level, **options: Any) -> tuple[Decoder, Any]:
    """A decoder from the meta device, sharded over all ranks, without values."""
    world_size = dist.get_world_size()
    domain = 1 if outer is not Level.REPLICATE and world_size > 1 else None
    meshes = Topology(world_size=world_size, nvlink_domain=domain).meshes("cpu")
    with torch.device("meta"):
        decoder = Decoder(DecoderConfig.from_hf(hf), torch.float32, **options)
    placements = placements_for(outer, inner)
    context = shard_decoder(decoder, meshes, placements, placements, MixedPrecision(), "cpu")
    return decoder, context


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(0, 257, (2, 17), generator=generator)
    labels = torch.randint(0, 257, (2, 17), generator=generator)
    labels[0, : 5 * rank] = -100
    return tokens, labels


def loss_of(decoder: Decoder, rank: int, step: int, ranks: int) -> torch.Tensor:
    """This rank's share of a loss that is the sum over ranks; gradients are averaged, hence n."""
    tokens, labels = batch(rank, step)
    output = decoder(tokens, labels=labels)
    loss: torch.Tensor = output.loss_sum / 100
    if output.auxiliary is not None:
        loss = loss + 0.1 * output.auxiliary
    return loss * ranks


def train_sharded(hf: dict[str, Any], outer: Level, inner: Level, recompute: str) -> Any:
    decoder, context = sharded(hf, outer, inner, recompute=recompute)
    initialize(decoder, SEED)
    optimizer = torch.optim.SGD(decoder.parameters(), lr=RATE)
    fully_shard_optimizer(optimizer)
    rank, ranks, losses = dist.get_rank(), dist.get_world_size(), []
    for step in range(STEPS):
        with microbatch(context, is_last=True):
            loss = loss_of(decoder, rank, step, ranks)
            loss.backward()
        losses.append(loss.item() / ranks)
        optimizer.step()
        optimizer.zero_grad()
    held = [(p.name, p.row_start, p.local.detach().clone()) for p in sharded_parameters(decoder)]
    return losses, held


def train_plain(hf: dict[str, Any], ranks: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    decoder = Decoder(DecoderConfig.from_hf(hf), torch.float32)
    initialize(decoder, SEED)
    optimizer = torch.optim.SGD(decoder.parameters(), lr=RATE)
    losses = []
    for step in range(STEPS):
        total = torch.stack([loss_of(decoder, rank, step, 1) for rank in range(ranks)]).sum()
        total.backward()
        losses.append(total.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: p.detach() for name, p in decoder.named_parameters()}


@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        (Level.REPLICATE, Level.PARAMETERS),
        (Level.OPTIMIZER, Level.PARAMETERS),
        (Level.REPLICATE, Level.OPTIMIZER),
    ],
)
@pytest.mark.parametrize("name", ["smollm2", "qwen2_moe", "olmoe"])
def test_two_ranks_equal_one(name: str, outer: Level, inner: Level, ranks: RankPool) -> None:
    losses, whole = train_plain(TINY[name], 2)
    results = ranks.run(2, train_sharded, TINY[name], outer, inner, "none")
    summed = [sum(pair) for pair in zip(*(result[0] for result in results), strict=True)]
    assert summed == pytest.approx(losses, rel=1e-5)
    rows = dict.fromkeys(whole, 0)
    for _, held in results:
        for parameter, start, local in held:
            expected = whole[parameter][start : start + local.shape[0]]
            torch.testing.assert_close(local, expected, rtol=1e-5, atol=1e-6)
            rows[parameter] += local.shape[0]
    copies = 2 if inner is Level.OPTIMIZER and outer is Level.OPTIMIZER else 1
    assert rows == {parameter: copies * tensor.shape[0] for parameter, tensor in whole.items()}


def test_recomputed_layers_change_nothing_when_sharded(ranks: RankPool) -> None:
    levels = (Level.REPLICATE, Level.PARAMETERS)
    hf = TINY["qwen2_moe"]
    plain = ranks.run(2, train_sharded, hf, *levels, "none")
    recomputed = ranks.run(2, train_sharded, hf, *levels, "layer")
    for (losses, held), (other_losses, other_held) in zip(plain, recomputed, strict=True):
        assert losses == other_losses
        for (_, _, local), (_, _, other) in zip(held, other_held, strict=True):
            assert torch.equal(local, other)


def initial_bits(hf: dict[str, Any]) -> list[tuple[str, int, torch.Tensor]]:
    decoder, _ = sharded(hf, Level.OPTIMIZER, Level.PARAMETERS)
    initialize(decoder, SEED)
    return [(p.name, p.row_start, p.local.detach().clone()) for p in sharded_parameters(decoder)]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_initial_weights_are_equal_at_every_layout(num_ranks: int, ranks: RankPool) -> None:
    hf = TINY["qwen3_moe"]
    source = InitialWeights(parameter_shapes(DecoderConfig.from_hf(hf)), SEED, 0.2)
    for held in ranks.run(num_ranks, initial_bits, hf):
        for name, start, local in held:
            assert torch.equal(local, source.rows(name, start, start + local.shape[0]))


class Recorder:
    """A source that remembers which rows it was asked for."""

    def __init__(self, inner: HFWeights) -> None:
        self.inner = inner
        self.asked: list[tuple[str, int, int]] = []

    def shapes(self) -> Mapping[str, torch.Size]:
        return self.inner.shapes()

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        self.asked.append((name, start, stop))
        return self.inner.rows(name, start, stop)


def load_folder(hf: dict[str, Any], folder: Path) -> Any:
    decoder, _ = sharded(hf, Level.REPLICATE, Level.PARAMETERS)
    source = Recorder(HFWeights(folder))
    load_weights(decoder, source)
    held = [(p.name, p.row_start, p.row_stop) for p in sharded_parameters(decoder)]
    logits = decoder(torch.arange(20).view(1, 20)).logits
    assert logits is not None
    return source.asked, held, logits.detach()


@pytest.mark.parametrize("name", ["smollm2", "mixtral"])
def test_only_the_rows_held_are_read(name: str, tmp_path: Path, ranks: RankPool) -> None:
    hf = TINY[name]
    config = DecoderConfig.from_hf(hf)
    plain = Decoder(config, torch.float32)
    initialize(plain, 5)
    tensors = ((n, p.detach()) for n, p in plain.named_parameters())
    write_hf_folder(tmp_path / "model", config, tensors)
    results = ranks.run(2, load_folder, hf, tmp_path / "model")
    expected = plain(torch.arange(20).view(1, 20)).logits
    for asked, held, logits in results:
        assert asked == [(n, start, stop) for n, start, stop in held if stop > start]
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    everything = sorted(part for asked, _, _ in results for part in asked)
    covered = dict.fromkeys(parameter_shapes(config), 0)
    for parameter, start, stop in everything:
        assert start == covered[parameter]
        covered[parameter] = stop
    assert covered == {n: s[0] for n, s in parameter_shapes(config).items()}


BIG = TINY["llama2"] | {
    "vocab_size": 8192,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
}


def peak_growth(hf: dict[str, Any]) -> tuple[int, int]:
    """Bytes by which building and filling raised this process's memory at most, and all weights."""
    status, marks = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    initialize(sharded(TINY["llama2"], Level.REPLICATE, Level.PARAMETERS)[0], 1)  # imports and all
    marks.write_text("5")  # forget the peak so far
    before = _kilobytes(status, "VmHWM")
    decoder, _ = sharded(hf, Level.REPLICATE, Level.PARAMETERS)
    initialize(decoder, 1)
    whole = sum(4 * p.shape.numel() for p in sharded_parameters(decoder))
    return 1024 * (_kilobytes(status, "VmHWM") - before), whole


def _kilobytes(status: Path, key: str) -> int:
    line = next(line for line in status.read_text().splitlines() if line.startswith(key))
    return int(line.split()[1])


def test_no_rank_ever_holds_the_whole_model(ranks: RankPool) -> None:
    for growth, whole in ranks.run(4, peak_growth, BIG):
        assert growth < 0.5 * whole, (growth, whole)  # its quarter, and a chunk of rows


def test_units_are_experts_layers_and_the_rest() -> None:
    units = decoder_units(DecoderConfig.from_hf(TINY["qwen2_moe"]))
    assert [(unit.path, unit.expert) for unit in units] == [
        ("model.layers.0.mlp.experts", True),
        ("model.layers.0", False),
        ("model.layers.1", False),
        ("model.layers.2.mlp.experts", True),
        ("model.layers.2", False),
        ("", False),
    ]


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ({"lm_head.weight": None}, "lm_head.weight.*missing"),
        ({"more.weight": (2, 3)}, "more.weight.*no such parameters"),
        ({"model.norm.weight": (65,)}, r"model.norm.weight.*\(65,\)"),
    ],
)
def test_sources_that_do_not_fit_are_refused_before_anything_is_filled(
    shapes: dict[str, Any], words: str
) -> None:
    config = DecoderConfig.from_hf(TINY["llama2"])
    decoder = Decoder(config, torch.float32)
    initialize(decoder, 1)
    before = [p.clone() for p in decoder.parameters()]
    offered: dict[str, torch.Size] = dict(parameter_shapes(config))
    for name, shape in shapes.items():
        offered.pop(name, None)
        if shape is not None:
            offered[name] = torch.Size(shape)
    with pytest.raises(ConfigError, match=words):
        load_weights(decoder, InitialWeights(offered, 2, 0.1))
    assert all(torch.equal(a, b) for a, b in zip(before, decoder.parameters(), strict=True))
