"""Which numbers of workers a run may have."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.config import Config
from shoal.errors import ConfigError
from shoal.plan import (
    Machine,
    at_size,
    gpu_rates,
    plan_at,
    sizes_as_dict,
    sizes_of,
    sizes_sheet,
)
from tests.training.tiny import MIXTURE, make_config, write_text

MACHINE = Machine(has_cuda=False, cpu_has_bf16=False)


def _config(folder: Path, **sections: dict[str, Any]) -> Config:
    write_text(folder / "text.txt")
    return make_config(folder, **sections)


def test_sizes_divide_the_batch(tmp_path: Path) -> None:
    cluster = {"workers": 4, "workers_min": 1, "workers_max": 16}
    config = _config(tmp_path, cluster=cluster, train={"global_batch": 24, "micro_batch": 2})
    sizes = sizes_of(config)
    assert sizes.feasible == (1, 2, 3, 4, 6, 12)
    assert "does not divide into microbatches of 2 on 5" in sizes.refused[5]
    plans = [plan_at(config, size, MACHINE) for size in sizes.feasible]
    assert {plan.batches.global_batch for plan in plans} == {24}
    assert [plan.batches.num_microbatches for plan in plans] == [12, 6, 4, 3, 2, 1]
    # Fewer ranks hold more of the model each.
    peaks = [plan.fullest.peak for plan in plans]
    assert peaks[0] > peaks[-1]


@pytest.mark.parametrize(
    ("parallel", "domain", "feasible"),
    [
        ({"expert": 2}, None, (2, 4, 8)),
        ({"pipeline": 2}, None, (2, 4, 8)),
        ({"context": 2}, None, (2, 4, 8)),
        ({}, 4, (4, 8)),
        ({"pipeline": 2, "expert": 2}, 2, (4, 8)),
    ],
)
def test_sizes_fit_the_layout(
    tmp_path: Path, parallel: dict[str, int], domain: int | None, feasible: tuple[int, ...]
) -> None:
    cluster = {"workers": 8, "workers_min": 1, "nvlink_domain": domain}
    config = _config(
        tmp_path,
        model={"config": MIXTURE},
        cluster=cluster,
        parallel=parallel,
        train={"global_batch": 8},
    )
    assert sizes_of(config).feasible == feasible


def test_an_unset_batch_is_that_of_the_configured_workers(tmp_path: Path) -> None:
    cluster = {"workers": 4, "workers_min": 2, "device": "cpu"}
    config = _config(tmp_path, cluster=cluster, train={"global_batch": None, "micro_batch": 3})
    assert sizes_of(config).feasible == (2, 4)
    assert at_size(config, 2).train.global_batch == 12


def test_sizes_are_shown_with_what_they_need(tmp_path: Path) -> None:
    cluster = {"workers": 4, "workers_min": 1}
    config = _config(tmp_path, cluster=cluster, train={"global_batch": 4})
    sizes, rates = sizes_of(config), gpu_rates("H100")
    plans = [plan_at(config, size, Machine.with_gpus(), rates=rates) for size in sizes.feasible]
    tight = replace(plans[0], rates=replace(rates, memory_bytes=plans[0].fullest.peak - 1))
    sheet = sizes_sheet(sizes, [tight, *plans[1:]])
    assert [(row[0], row[1], row[2], row[5]) for row in sheet.rows] == [
        ("4", "4", "1 x 1", ""),
        ("2", "2", "2 x 1", ""),
        ("1", "1", "4 x 1", "too much"),
    ]
    assert "Another does not divide: with 3, train.global_batch = 4" in sheet.note
    values = sizes_as_dict(sizes, [tight, *plans[1:]])
    assert [(size["workers"], size["fits"]) for size in values["feasible"]] == [
        (1, False),
        (2, True),
        (4, True),
    ]
    # Nobody said how large the devices of this machine are.
    here = [plan_at(config, size, MACHINE) for size in sizes.feasible]
    assert "memory" not in sizes_sheet(sizes, here).header


def test_bounds_that_allow_nothing_are_refused(tmp_path: Path) -> None:
    cases = {
        "workers_min": ({"workers": 4, "workers_min": 3}, "with 3, .* = 4: it does not divide"),
        "workers_max": ({"workers": 4, "workers_max": 7}, "with 5, .* = 4: it does not divide"),
    }
    for name, (cluster, problem) in cases.items():
        with pytest.raises(ConfigError, match=rf"cluster\.{name} = .*no number of .*{problem}"):
            sizes_of(_config(tmp_path, cluster=cluster))
    with pytest.raises(ConfigError, match="Use 2, the next size that it has, or choose"):
        sizes_of(_config(tmp_path, cluster=cases["workers_min"][0]))
    with pytest.raises(ConfigError, match=r"cluster\.workers_min = 3: is more than .* = 2"):
        _config(tmp_path, cluster={"workers": 2, "workers_min": 3})
    with pytest.raises(ConfigError, match=r"cluster\.workers_max = 1: is less than .* = 2"):
        _config(tmp_path, cluster={"workers": 2, "workers_max": 1})
