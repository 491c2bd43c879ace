"""Every example is a valid configuration, in the places where it says what it shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.config import Config, Level, load_config

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_examples_load(path: Path) -> None:
    assert isinstance(load_config(path), Config)


def test_the_demo_shards_over_two_domains() -> None:
    config = load_config(EXAMPLES / "demo.yaml")
    assert (config.cluster.workers, config.cluster.nvlink_domain) == (2, 1)
    assert config.sharding.dense.outer is Level.OPTIMIZER
    assert config.sharding.dense.inner is Level.PARAMETERS
