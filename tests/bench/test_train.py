"""The comparison of training steps: everyone trains the same, and the report adds up."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist

from shoal.bench import BenchCase, BenchReport, BenchSetup, bench_train
from shoal.bench.contenders import Contender, alone, ddp, fsdp2, ours
from shoal.config import Level
from shoal.errors import ConfigError
from tests.ranks import RankPool

TINY = BenchSetup(hidden_size=64, num_layers=1, vocab_size=257, shapes=((1, 8),), rounds=2)


def _contenders() -> list[Contender]:
    return [
        ours("ZeRO-3", Level.PARAMETERS),
        ours("ZeRO-1", Level.OPTIMIZER),
        ours("replicate", Level.REPLICATE),
        fsdp2("ZeRO-3", reshard_after_forward=None),
        fsdp2("ZeRO-2", reshard_after_forward=False),
        ddp(),
    ]


def _losses() -> dict[str, list[float]]:
    rank = dist.get_rank()
    tokens = torch.randint(257, (2, 9), generator=torch.Generator().manual_seed(rank))
    contenders = [*_contenders(), alone()]
    steps = {contender.name: contender.build(TINY.decoder) for contender in contenders}
    return {
        name: [step(tokens[:, :-1], tokens[:, 1:]).item() for _ in range(8)]
        for name, step in steps.items()
    }


def test_every_contender_trains_the_same_model_alike(ranks: RankPool) -> None:
    for losses in ranks.run(2, _losses):
        reference = losses.pop("shoal replicate")
        assert reference[-1] < reference[0] - 0.01
        without_peers = losses.pop("nothing sent")
        assert without_peers[0] == pytest.approx(reference[0], rel=1e-3)
        for values in losses.values():
            assert values == pytest.approx(reference, rel=1e-3)


def test_the_report_tells_what_was_timed() -> None:
    report = bench_train(against="ddp", setup=TINY)
    (case,) = report.cases
    assert (case.ours, case.theirs) == ("shoal replicate", "torch DDP")
    assert len(case.our_steps_s) == len(case.their_steps_s) == len(case.alone_steps_s) == 2
    assert all(seconds > 0 for seconds in case.our_steps_s + case.alone_steps_s)
    (plain,) = json.loads(json.dumps(report.json()))["cases"]
    assert plain["ratio"] == case.ratio
    assert "shoal replicate" in report.text()


def test_a_ratio_is_the_median_of_the_rounds() -> None:
    case = BenchCase(
        ours="ours",
        theirs="theirs",
        sequences=2,
        tokens=5,
        ranks=2,
        our_steps_s=(1.0, 2.0, 4.0),
        their_steps_s=(3.0, 2.0, 8.0),
        alone_steps_s=(0.5, 0.5, 0.5),
    )
    assert case.ratio == 2.0
    assert case.our_tokens_per_s == 10.0
    text = BenchReport(model="a model", cases=(case,)).text()
    assert text.splitlines()[-1].split() == (
        "2 x 5 ours 2000 theirs 3000 500 10 / 7 = 2.00".split()
    )


def test_an_unknown_opponent_is_refused() -> None:
    with pytest.raises(ConfigError, match="Use fsdp2 or ddp"):
        bench_train(against="fsdp1")
