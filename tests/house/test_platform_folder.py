"""The source roots must stay plain folders."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("folder", ["platform", "actors", "deployments"])
def test_source_roots_are_no_packages(folder: str) -> None:
    """``platform/__init__.py`` would shadow the standard library's module and kill Ray at start."""
    assert (ROOT / folder).is_dir()
    assert not (ROOT / folder / "__init__.py").exists()
