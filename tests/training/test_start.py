"""Where a run goes on, and what is refused about it."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from shoal.checkpoint import RunFolder, save
from shoal.errors import ConfigError
from shoal.training import check_resume, check_storage, starting_point
from tests.checkpoint.plain import local


def _save(folder: Path, *numbers: int) -> list[Path]:
    model = nn.Linear(2, 2)
    return [
        local(save(folder, number, model=model, optimizer=None, counters={}).path)
        for number in numbers
    ]


def test_a_new_run_starts_anew_or_from_a_path(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    for resume in ("auto", "never", "elsewhere/step-00000003"):
        check_resume(folder, resume)
    assert starting_point(folder, "auto") is None
    assert starting_point(folder, "never") is None
    assert starting_point(folder, "elsewhere/step-00000003") == Path("elsewhere/step-00000003")


def test_the_runs_own_newest_checkpoint_comes_first(tmp_path: Path) -> None:
    folder, other = tmp_path / "checkpoints", tmp_path / "other"
    own = _save(folder, 2, 4)
    elsewhere = _save(other, 9)
    for resume in ("auto", str(own[1]), str(elsewhere[0])):
        check_resume(folder, resume)
        assert starting_point(folder, resume) == own[1]
    # An attempt after a failure must not start over, whatever was asked of the first one.
    assert starting_point(folder, "never") == own[1]


def test_contradictions_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    own = _save(folder, 2, 4)
    with pytest.raises(ConfigError, match="holds checkpoints 2, 4 of an earlier run"):
        check_resume(folder, "never")
    with pytest.raises(ConfigError, match="the run went on to step 4"):
        check_resume(folder, str(own[0]))


def test_a_run_is_not_begun_anew_because_its_checkpoints_were_told_to_go_elsewhere(
    tmp_path: Path,
) -> None:
    here, there = (RunFolder(tmp_path / "run", uri) for uri in (None, f"file://{tmp_path}/far"))
    check_storage(there, "auto")
    (own,) = _save(local(here.checkpoints), 2)
    with pytest.raises(ConfigError, match=f"up to step 2 are in .* checkpoint.resume={own}"):
        check_storage(there, "auto")
    for folder, resume in ((here, "auto"), (there, str(own)), (there, "never")):
        check_storage(folder, resume)
    _save(local(there.checkpoints), 4)
    check_storage(there, "auto")
    (tmp_path / "run" / "config.yaml").write_text(f"checkpoint: {{storage: '{there.storage}'}}")
    check_storage(there, "auto")


def test_a_half_written_checkpoint_does_not_count(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    own = _save(folder, 2, 4)
    (own[1] / "manifest.json").unlink()
    assert starting_point(folder, "auto") == own[0]
