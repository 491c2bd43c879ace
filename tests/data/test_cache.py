"""Folders that appear whole or not at all."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from shoal.data.cache import cached
from shoal.errors import WorkError


def _read(folder: Path) -> str:
    text = (folder / "content").read_text()
    if text == "damaged":
        raise WorkError("damaged")
    return text


class _Builder:
    """Writes one file and counts how often."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.calls = 0

    def __call__(self, folder: Path) -> None:
        self.calls += 1
        (folder / "content").write_text(self.text)


def test_a_folder_is_built_once(tmp_path: Path) -> None:
    builder = _Builder("a")
    for _ in range(2):
        assert cached(tmp_path / "new" / "root", "key", builder, _read) == "a"
    assert builder.calls == 1
    assert [path.name for path in (tmp_path / "new" / "root").iterdir()] == ["key"]


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "content").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached(tmp_path, "key", fail, _read)
    assert not list(tmp_path.iterdir())
    assert cached(tmp_path, "key", _Builder("whole"), _read) == "whole"


def test_what_a_killed_builder_left_is_never_used_and_removed_after_a_day(tmp_path: Path) -> None:
    for name in (".key.old.partial", ".key.new.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "content").write_text("half")
    day_ago = time.time() - 25 * 3600
    for path in (tmp_path / ".key.old.partial" / "content", tmp_path / ".key.old.partial"):
        os.utime(path, (day_ago, day_ago))
    assert cached(tmp_path, "key", _Builder("whole"), _read) == "whole"
    # The newer one may belong to a builder that still lives.
    assert sorted(path.name for path in tmp_path.iterdir()) == [".key.new.partial", "key"]


def test_of_two_builders_the_first_wins(tmp_path: Path) -> None:
    late = _Builder("late")

    def slow(folder: Path) -> None:
        assert cached(tmp_path, "key", _Builder("first"), _read) == "first"
        late(folder)

    assert cached(tmp_path, "key", slow, _read) == "first"
    assert late.calls == 1
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


def test_a_damaged_folder_is_built_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "key").mkdir()
    (tmp_path / "key" / "content").write_text("damaged")
    assert cached(tmp_path, "key", _Builder("whole"), _read) == "whole"
    assert "Building" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(WorkError, match="cannot write tokenized data to .*file"):
        cached(tmp_path / "file", "key", _Builder("a"), _read)
