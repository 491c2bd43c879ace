"""The learning rate over steps."""

from __future__ import annotations

import math

import pytest

from shoal.config import OptimizerSettings
from shoal.training import LearningRate


def _rates(num_steps: int, **schedule: object) -> list[float]:
    settings = OptimizerSettings.model_validate({"lr": 2.0, "schedule": schedule})
    rate = LearningRate(settings=settings, num_steps=num_steps).at
    return [rate(step) for step in range(num_steps)]


def test_warmup_reaches_the_peak_without_a_step_at_zero() -> None:
    assert _rates(6, kind="constant", warmup_steps=3) == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]


def test_linear_falls_to_the_final_share() -> None:
    rates = _rates(8, kind="linear", decay_steps=4, final=0.5)
    assert rates == [2.0, 1.75, 1.5, 1.25, 1.0, 1.0, 1.0, 1.0]


def test_cosine_is_the_half_wave() -> None:
    rates = _rates(10, kind="cosine", warmup_steps=2, final=0.1)
    expected = [2.0 * (0.1 + 0.9 * (1 + math.cos(math.pi * step / 8)) / 2) for step in range(8)]
    assert rates[2:] == pytest.approx(expected)


def test_wsd_is_stable_until_its_tail() -> None:
    rates = _rates(20, kind="wsd", warmup_steps=1)
    assert rates[1:19] == [2.0] * 18
    assert rates[19] == pytest.approx(1.0)
    assert _rates(20, kind="wsd", decay_steps=4)[15:] == [2.0, 2.0, 1.5, 1.0, 0.5]
