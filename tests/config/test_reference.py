"""The reference page is complete and current."""

from __future__ import annotations

from pathlib import Path

from shoal.config.keys import all_keys
from shoal.config.reference import render_reference

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == render_reference(), (
        "run `python -m shoal.config.reference` to write docs/configuration.md again"
    )


def test_every_key_is_documented() -> None:
    undocumented = [key.path for key in all_keys() if not key.meaning.endswith(".")]
    assert undocumented == []


def test_only_three_keys_are_required() -> None:
    required = [key.path for key in all_keys() if key.required and not key.section]
    assert required == ["data.sources.*.path", "train.steps"]
