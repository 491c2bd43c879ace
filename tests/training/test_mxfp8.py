"""Training in MXFP8 beside bf16, and at every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ranks import RankPool
from tests.training.tiny import MIXTURE, make_config
from tests.training.walks import losses_of_walks

MODEL: dict[str, Any] = {
    **MIXTURE,
    "hidden_size": 64,
    "head_dim": 32,
    "num_attention_heads": 2,
    "moe_intermediate_size": 32,
    "num_experts": 4,
}


def _compare(folder: Path, ranks: RankPool, num_steps: int) -> tuple[float, float, float]:
    """The first loss in bf16, and the mean of the last ten in bf16 and in MXFP8."""
    found = []
    for compute in ("bf16", "mxfp8"):
        config = make_config(
            folder,
            model={"config": MODEL},
            precision={"compute": compute},
            optimizer={"lr": 3e-3, "clip": 1.0},
            train={"steps": num_steps},
        )
        (losses,) = ranks.run(1, losses_of_walks, config, num_steps)
        found.append(losses)
    bf16, mxfp8 = found
    return bf16[0], sum(bf16[-10:]) / 10, sum(mxfp8[-10:]) / 10


def test_a_mixture_learns_as_in_bf16(tmp_path: Path, ranks: RankPool) -> None:
    first, bf16, mxfp8 = _compare(tmp_path, ranks, 50)
    assert bf16 < 0.8 * first
    assert mxfp8 == pytest.approx(bf16, rel=0.01)
    assert mxfp8 != bf16


@pytest.mark.full
def test_a_mixture_learns_as_in_bf16_for_200_steps(tmp_path: Path, ranks: RankPool) -> None:
    first, bf16, mxfp8 = _compare(tmp_path, ranks, 200)
    assert bf16 < 0.4 * first
    assert mxfp8 == pytest.approx(bf16, rel=0.01)
