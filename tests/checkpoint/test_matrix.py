"""Twelve layouts: what each saved is, to the bit, what each other loads."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from tests.checkpoint.matrix import (
    LAYOUTS,
    Found,
    Saved,
    Whole,
    config_of,
    load_each,
    same_bits,
    save_each,
)
from tests.ranks import RankPool

NAMES = list(LAYOUTS)
SPANNING = [(NAMES[number], NAMES[(number + 5) % len(NAMES)]) for number in range(len(NAMES))]
"""Each layout saves for one and loads from one other."""

FORMATS = {
    "fp32": {},
    "moments in 8 bits": {"moments": "8bit"},
    "all in bf16": {"main_weights": "bf16", "moments": "bf16"},
}


def _save_all(ranks: RankPool, folder: Path, **precision: str) -> dict[str, list[Saved]]:
    """By layout, what its ranks held; whole, beside its checkpoint, for whoever loads it."""
    saved: dict[str, list[Saved]] = {}
    for size in {layout.ranks for layout in LAYOUTS.values()}:
        configs = {
            name: config_of(folder, name, **precision)
            for name, layout in LAYOUTS.items()
            if layout.ranks == size
        }
        by_rank = ranks.run(size, save_each, folder, configs)
        for name in configs:
            saved[name] = [found[name] for found in by_rank]
            torch.save(_whole(saved[name]), folder / name / "whole.pt")
    return saved


def _whole(by_rank: Iterable[Saved]) -> Whole:
    """The rows of all ranks together; replicas must agree."""
    parts: dict[str, dict[str, dict[int, torch.Tensor]]] = {}
    for saved in by_rank:
        for name, start, state in saved.held:
            for key, value in state.items():
                known = parts.setdefault(name, {}).setdefault(key, {})
                assert same_bits(known.setdefault(start if value.ndim else 0, value), value)
    return {
        name: {key: _joined(values) for key, values in state.items()}
        for name, state in parts.items()
    }


def _joined(parts: dict[int, torch.Tensor]) -> torch.Tensor:
    values = [parts[start] for start in sorted(parts)]
    return torch.cat(values) if values[0].ndim else values[0]


def _check_pair(saved: list[Saved], found: list[Found], whole: Whole) -> None:
    """All rows are there, the sampler goes on, generators fit, and the next step is the same."""
    covered: dict[str, set[int]] = {}
    for rank in found:
        for name, start, stop in rank.rows:
            covered.setdefault(name, set()).update(range(start, stop))
    assert covered == {name: set(range(len(s["weight"]))) for name, s in whole.items()}
    for number, rank in enumerate(found):
        assert rank.ids == saved[0].ids
        if len(saved) == len(found):
            assert rank.rng is not None and torch.equal(rank.rng, saved[number].rng)
        else:
            assert rank.rng is None
        assert rank.metrics.loss == pytest.approx(saved[0].metrics.loss, rel=1e-5)
        assert rank.metrics.auxiliary_loss == pytest.approx(
            saved[0].metrics.auxiliary_loss, rel=1e-5
        )
        assert rank.metrics.grad_norm == pytest.approx(saved[0].metrics.grad_norm, rel=1e-5)


def _load_pairs(
    ranks: RankPool, folder: Path, pairs: list[tuple[str, str]], **precision: str
) -> None:
    saved = _save_all(ranks, folder, **precision)
    wholes = {name: torch.load(folder / name / "whole.pt") for name in NAMES}
    for target, layout in LAYOUTS.items():
        sources = [source for source, into in pairs if into == target]
        config = config_of(folder, target, **precision)
        by_rank = ranks.run(layout.ranks, load_each, folder, config, sources)
        for source in sources:
            _check_pair(saved[source], [found[source] for found in by_rank], wholes[source])


def test_each_layout_loads_what_another_saved(ranks: RankPool, tmp_path: Path) -> None:
    assert len(NAMES) == 12
    _load_pairs(ranks, tmp_path, SPANNING)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("formats", FORMATS.values(), ids=FORMATS)
def test_each_layout_loads_what_each_saved(
    ranks: RankPool, tmp_path: Path, formats: dict[str, str]
) -> None:
    _load_pairs(ranks, tmp_path, [(a, b) for a in NAMES for b in NAMES], **formats)
