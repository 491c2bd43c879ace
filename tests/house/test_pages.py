"""The pages that list fields and names list all of them, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from shoal.inference.journal import JournalStats
from shoal.inference.protocol import Stats
from shoal.training import EventKind, StepMetrics
from shoal_actors.train.failure import FailureReport
from shoal_deployments.engine_client import ReplicaStats
from shoal_deployments.metrics import Metrics

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

STATS = ReplicaStats(
    replica="0",
    stats=Stats(**{field.name: 0 for field in fields(Stats)}),
    journal=JournalStats(**{field.name: 0 for field in fields(JournalStats)}),
)


def _tables(page: str, heading: str) -> list[dict[str, list[str]]]:
    """The tables under a heading: of each row the name, and the other cells."""
    text = (DOCS / page).read_text(encoding="utf-8")
    (section,) = re.findall(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    tables: list[dict[str, list[str]]] = []
    for block in re.findall(r"(?:^\|.*\n)+", section, re.M):
        rows = [line.strip("| ").split(" | ") for line in block.splitlines()[2:]]
        tables.append({row[0].strip("`"): row[1:] for row in rows})
    return tables


def _noted() -> Iterator[tuple[EventKind, str]]:
    """The kinds of events that the sources note, each with the keys that it is given by name."""
    paths = [path for folder in ("platform", "actors") for path in (ROOT / folder).rglob("*.py")]
    nodes = (node for path in paths for node in ast.walk(ast.parse(path.read_text("utf-8"))))
    for call in (node for node in nodes if isinstance(node, ast.Call)):
        for argument in call.args:
            if isinstance(argument, ast.Attribute) and ast.unparse(argument.value) == "EventKind":
                for keyword in call.keywords:
                    yield EventKind[argument.attr], keyword.arg or ""


def _families() -> dict[str, str]:
    """What ``/metrics`` has: each name, and its kind."""
    text = Metrics().text([STATS]).decode()
    kinds = {family.name: family.type for family in text_string_to_metric_families(text)}
    return {
        f"{name}_total" if kind == "counter" else name: kind
        for name, kind in kinds.items()
        if not name.endswith("_created")
    }


def test_every_key_of_a_step_is_listed() -> None:
    (table,) = _tables("runs.md", "metrics.jsonl")
    assert list(table) == [field.name for field in fields(StepMetrics)]


def test_every_event_is_listed() -> None:
    (table,) = _tables("runs.md", "events.jsonl")
    assert list(table) == [kind.value for kind in EventKind]
    keys = {*_noted(), *((EventKind.FAILURE, field.name) for field in fields(FailureReport))}
    for kind, key in keys:
        assert not key or f"`{key}`" in table[kind][-1], f"{kind} has {key}"


def test_every_number_of_an_engine_is_listed_with_its_kind() -> None:
    engines, _ = _tables("http.md", "Numbers")
    listed = {
        f"shoal_engine_{name}{'_total' if kind == 'counter' else ''}": kind
        for name, (kind, _) in engines.items()
    }
    found = {name: kind for name, kind in _families().items() if name.startswith("shoal_engine_")}
    assert listed == found


def test_every_number_of_a_frontend_is_listed() -> None:
    _, frontends = _tables("http.md", "Numbers")
    found = {name for name in _families() if not name.startswith("shoal_engine_")}
    assert set(frontends) == found
