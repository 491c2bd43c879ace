"""What counts as a step, what goes and what stays."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from shoal.checkpoint import clean, newest, pin, prune, steps, unpin, verify
from shoal.storage import medium_of
from tests.checkpoint.plain import model_of, save_plain


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """Steps 1 to 4, where 3 is damaged, between what killed saves and strangers left."""
    for step in (1, 2, 3, 4):
        save_plain(tmp_path, step, model_of(step))
    (tmp_path / "step-00000003" / "manifest.json").unlink()
    for name in ("notes", "step-best", "step-00000009.bak", ".step-00000005.tmp-0123abcd"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("kept")
    (tmp_path / "step-00000008").write_text("a file, no folder")
    return tmp_path


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_only_complete_steps_are_listed(checkpoints: Path) -> None:
    assert [step.number for step in steps(checkpoints)] == [1, 2, 4]
    last = newest(checkpoints)
    assert last is not None and last.path == checkpoints / "step-00000004"


def test_a_folder_that_does_not_exist_has_no_steps(tmp_path: Path) -> None:
    assert steps(tmp_path / "none") == ()
    assert newest(tmp_path / "none") is None
    assert clean(tmp_path / "none") == ()


def test_pruning_counts_complete_steps_and_deletes_nothing_else(checkpoints: Path) -> None:
    before = _names(checkpoints)
    assert [step.number for step in prune(checkpoints, 2)] == [1]
    assert before - _names(checkpoints) == {"step-00000001"}
    pin(checkpoints / "step-00000002")
    assert [step.number for step in prune(checkpoints, 1)] == []
    unpin(checkpoints / "step-00000002")
    assert [step.number for step in prune(checkpoints, 1)] == [2]
    assert [step.number for step in prune(checkpoints, 1)] == []
    assert prune(checkpoints, None) == ()
    assert before - _names(checkpoints) == {"step-00000001", "step-00000002"}


def test_a_step_that_was_moved_to_another_disk_stays_there(checkpoints: Path) -> None:
    far = checkpoints / "far"
    (checkpoints / "step-00000001").rename(far)
    (checkpoints / "step-00000001").symlink_to(far)
    assert [step.number for step in prune(checkpoints, 2)] == [1]
    assert verify(far) == () and far.name in _names(checkpoints)
    assert "step-00000001" not in _names(checkpoints)
    assert [path for path in checkpoints.iterdir() if path.is_symlink()] == []


def test_cleaning_deletes_leftovers_and_nothing_else(checkpoints: Path) -> None:
    before = _names(checkpoints)
    (checkpoints / ".step-00000002.old-0123abcd").mkdir()
    clean(checkpoints)
    assert before - _names(checkpoints) == {".step-00000005.tmp-0123abcd"}
    assert _names(checkpoints) - before == set()


def test_whoever_looks_does_not_mind_files_that_come_and_go(tmp_path: Path) -> None:
    medium, ended = medium_of(tmp_path), threading.Event()

    def come_and_go() -> None:
        while not ended.is_set():
            medium.put(tmp_path / "note", b"1")  # under another name first

    other = threading.Thread(target=come_and_go)
    other.start()
    try:
        seen = [medium.sizes(tmp_path) for _ in range(3000)]
    finally:
        ended.set()
        other.join()
    assert set(seen[-1]) <= {"note", "note.draft"}
