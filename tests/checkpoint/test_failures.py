"""One rank fails in the middle of a save: nothing is published, and every rank says so."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch.distributed as dist

from shoal.checkpoint import capture_rng, load, newest, save, steps, verify
from shoal.errors import WorkError
from tests.checkpoint.plain import local, model_of, trained
from tests.ranks import RankFailure, RankPool
from tests.short_disk import file_size_limit

LIMIT_BYTES = 2000
"""Within any rank's file: each holds its generator's state of 5,056 bytes."""


def _save(folder: Path, step: int) -> Path:
    model = model_of(step)
    optimizer = trained(model, num_steps=step)
    saved = save(
        folder, step, model=model, optimizer=optimizer, counters={"step": step}, rng=capture_rng()
    )
    return local(saved.path)


def _save_on_a_full_disk(folder: Path, failing: int) -> str:
    with file_size_limit(LIMIT_BYTES if dist.get_rank() == failing else 2**40):
        try:
            _save(folder, 2)
        except WorkError as error:
            return str(error)
    return "saved"


def _die_while_writing(folder: Path, notes: Path, failing: int) -> None:
    """Saves step 2; the failing rank is killed between two writes of one file."""
    if dist.get_rank() == failing:
        signal.signal(signal.SIGXFSZ, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    note = notes / str(dist.get_rank())
    try:
        note.write_text(_save_on_a_full_disk(folder, failing))
    finally:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)


def _save_apart(folder: Path) -> str:
    """Each rank names a folder that only it can see."""
    try:
        _save(folder / str(dist.get_rank()), 1)
    except WorkError as error:
        return str(error)
    return "saved"


def _load_steps(path: Path) -> float:
    model = model_of(9)
    optimizer = trained(model, num_steps=0)
    load(path, model=model, optimizer=optimizer)
    return float(optimizer.state[model.get_parameter("0.weight")]["step"])


def _load_refused(path: Path) -> str:
    try:
        _load_steps(path)
    except WorkError as error:
        return str(error)
    return "loaded"


@pytest.mark.parametrize("failing", [0, 1])
def test_a_short_write_then_a_refused_one_ends_the_save_on_every_rank(
    ranks: RankPool, tmp_path: Path, failing: int
) -> None:
    ranks.run(2, _save, tmp_path, 1)
    messages = ranks.run(2, _save_on_a_full_disk, tmp_path, failing)
    assert messages[0] == messages[1]
    assert f"__{failing}_0.distcp could not be written: File too large" in messages[0]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert ranks.run(2, _load_steps, tmp_path / "step-00000001") == [1.0, 1.0]
    ranks.run(2, _save, tmp_path, 2)
    assert [step.number for step in steps(tmp_path)] == [1, 2]


@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_killed_in_the_middle_of_a_save_leaves_nothing_that_counts(
    tmp_path: Path, killed: int
) -> None:
    folder = tmp_path / "checkpoints"
    _save(folder, 1)
    notes = tmp_path / "notes"
    notes.mkdir()
    pool = RankPool()  # of its own: a killed rank ends the pool
    try:
        with pytest.raises(RankFailure, match="the rank's process died"):
            pool.run(2, _die_while_writing, folder, notes, killed)
    finally:
        pool.close()
    assert "a peer was lost" in (notes / str(1 - killed)).read_text()
    assert not (notes / str(killed)).exists()
    last = newest(folder)
    assert last is not None and last.number == 1
    left = {path.name for path in folder.iterdir()} - {"step-00000001"}
    assert len(left) == (1 if killed == 0 else 0), "the first rank tidies up if it lives"

    second = _save(folder, 2)
    assert {path.name for path in folder.iterdir()} == {"step-00000001", "step-00000002"}
    assert verify(second) == ()
    assert {path.name for path in second.iterdir()} == {
        ".metadata",
        "__0_0.distcp",
        "index.json",
        "manifest.json",
    }


def test_folders_that_nodes_do_not_share_are_refused(ranks: RankPool, tmp_path: Path) -> None:
    messages = ranks.run(2, _save_apart, tmp_path)
    assert all("every node must share the run's folder" in message for message in messages)
    assert list(tmp_path.glob("*/*")) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_damage_that_one_rank_finds_ends_the_load_on_every_rank(
    ranks: RankPool, tmp_path: Path, rank: int
) -> None:
    path, _ = ranks.run(2, _save, tmp_path, 1)
    file = path / f"__{rank}_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    messages = ranks.run(2, _load_refused, path)
    assert messages[0] == messages[1]
    assert f"{file} does not match its checksum" in messages[0]
