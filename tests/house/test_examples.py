"""Every example is a valid configuration, in the places where it says what it shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from shoal.config import Config, Level, config_from_tree, load_config, serve_config_from_tree

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_examples_load(path: Path) -> None:
    assert isinstance(load_config(path), Config)


def test_the_demo_shards_over_two_domains() -> None:
    config = load_config(EXAMPLES / "demo.yaml")
    assert (config.cluster.workers, config.cluster.nvlink_domain) == (2, 1)
    assert config.sharding.dense.outer is Level.OPTIMIZER
    assert config.sharding.dense.inner is Level.PARAMETERS


def test_the_page_about_serving_shows_a_whole_configuration() -> None:
    page = (ROOT / "docs" / "serving.md").read_text()
    (shown,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert serve_config_from_tree(yaml.safe_load(shown)).serve.num_frontends == 2


def test_the_readme_shows_a_whole_configuration_of_ten_lines() -> None:
    (shown,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert isinstance(config_from_tree(yaml.safe_load(shown)), Config)
    assert len(shown.splitlines()) <= 10
