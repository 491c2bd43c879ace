"""What a rank logs, and what a full disk makes of it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from shoal_actors.train.rank_log import rank_log
from tests.short_disk import file_size_limit


def test_a_full_disk_costs_lines_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "logs" / "rank-0.log"
    with file_size_limit(150), pytest.raises(KeyError), rank_log(path):
        logging.getLogger("shoal").warning("there is room for this")
        logging.getLogger("shoal").warning("and for a part of this %s", 200 * "x")
        raise KeyError("scripted")
    assert "there is room for this" in path.read_text()
    assert path.stat().st_size <= 150
    assert capsys.readouterr().err == ""
