"""The comparison of saves and loads: everything is measured, and the ratios are of the rounds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.bench import CheckpointBenchSetup, CheckpointReport, Round, bench_checkpoint

TINY = CheckpointBenchSetup(
    hidden_size=64, num_layers=1, vocab_size=257, length=8, loop_steps=2, rounds=2
)


def test_the_report_tells_what_was_timed(tmp_path: Path) -> None:
    report = bench_checkpoint(folder=tmp_path, setup=TINY)
    assert len(report.rounds) == 2
    for each in report.rounds:
        assert 0 < each.stall_s < each.loop_with_save_s
        assert 0 < min(each.write_s, each.plain_s, each.load_s, each.dcp_save_s, each.dcp_load_s)
    num_parameters = 2 * 257 * 64 + 4 * 64 * 64 + 3 * 64 * 176 + 3 * 64
    assert report.num_bytes > 12 * num_parameters
    assert json.loads(json.dumps(report.json()))["ratios"]["load"] == report.load
    assert list(tmp_path.iterdir()) == []


def test_a_ratio_is_the_median_of_the_rounds() -> None:
    def timed(factor: float) -> Round:
        return Round(
            loop_s=1.0,
            loop_with_save_s=1.0 + factor,
            stall_s=0.1 * factor,
            write_s=2.0,
            plain_s=factor,
            load_s=1.0,
            dcp_save_s=4.0,
            dcp_load_s=factor,
        )

    rounds = (timed(1.0), timed(3.0), timed(2.0))
    report = CheckpointReport(num_bytes=10**6, ranks=2, rounds=rounds)
    ratios = (report.stall, report.lengthening, report.write, report.load)
    assert ratios == pytest.approx((0.05, 0.5, 1.0, 2.0))
    assert "0.050 of it" in report.text() and "1 MB on 2 ranks" in report.text()
