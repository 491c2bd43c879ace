"""Writing processes that do not answer: nothing of theirs is published, nor their memory used."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from shoal.checkpoint import steps
from shoal.checkpoint.shard import lay_out
from shoal.checkpoint.stager import Stager
from shoal.checkpoint.staging import StagingBuffer
from shoal.checkpoint.writing import SaveUnderWay, Writing
from shoal.errors import WorkError
from shoal.storage import Contents, Place, Publication, WriteJob, new_token
from tests.checkpoint.disks import device, frozen
from tests.checkpoint.saving import state_of, training, wait_until

NAME = "__0_0.distcp"


def _save(folder: Path, buffer: StagingBuffer) -> SaveUnderWay:
    """An empty file of one rank, and its publication."""
    os.ftruncate(buffer.descriptor, 1)
    job = WriteJob(
        place=Place(folder=folder, step=1, token=new_token()),
        name=NAME,
        descriptor=buffer.descriptor,
        num_bytes=1,
        patience_s=60.0,
        publication=Publication(
            num_bytes=1, names=(NAME,), contents=Contents(files={}, optimizer=None), keep=None
        ),
    )
    return SaveUnderWay(job=job, buffer=buffer, num_bytes=1, start=0.0)


def test_a_save_without_an_answer_is_given_up_before_it_is_called_failed(tmp_path: Path) -> None:
    """Its process would go on from memory that another save has filled by then."""
    with training(tmp_path, patience_s=0.1) as trainer:
        writer = trainer.saver.writer_pid
        os.kill(writer, signal.SIGSTOP)
        trainer.save(1)
        trainer.step()
        with pytest.raises(WorkError, match=r"Step 1 was not saved\. .* disk in 0\.2 s"):
            trainer.saver.drain()
        assert not Path(f"/proc/{writer}").exists()
    assert steps(tmp_path) == ()


def test_a_process_that_no_signal_ends_keeps_its_memory(tmp_path: Path) -> None:
    image, disk = tmp_path / "image", tmp_path / "disk"
    with image.open("wb") as file:
        file.truncate(16 * 2**20)
    with device(image, disk):
        stager = Stager()
        writing = Writing(0, stager.buffers, patience_s=0.1)
        first, second = stager.buffers
        try:
            with frozen(disk):
                save, writer = _save(disk, first), writing.pid
                writing.send(save)
                wait_until(lambda: state_of(writer) == "D", timeout_s=60.0)
                writing.give_up(save, [save])
                assert save.outcome is not None and save.outcome.error is not None
                assert "does not end: its disk hangs" in save.outcome.error
                assert writing.pid != writer
                assert stager.free([]) is second
                assert stager.free([second]) is first
                with pytest.raises(WorkError, match="that of an earlier save"):
                    first.lay(lay_out(0, (), ()), (), ())
            wait_until(lambda: not first.is_read)
            assert stager.free([]) is first
            assert steps(disk) == ()
        finally:
            writing.close()
            stager.close()


def test_a_save_given_up_while_it_waits_leaves_the_one_before_it_alone(tmp_path: Path) -> None:
    """Be that as slow as it may: its process hears in time that the other is not wanted."""
    stager = Stager()
    writing = Writing(0, stager.buffers, patience_s=60.0)
    first, second = stager.buffers
    slow, waiting, later = (
        _save(tmp_path / name, buffer)
        for name, buffer in (("slow", first), ("waiting", second), ("later", second))
    )
    writer = writing.pid

    def heard() -> bool:
        writing.hear([slow, later], 0.1)
        return later.outcome is not None

    try:
        os.kill(writer, signal.SIGSTOP)
        writing.send(slow)
        writing.send(waiting)
        writing.give_up(waiting, [slow, waiting])
        writing.send(later)
        os.kill(writer, signal.SIGCONT)
        wait_until(heard)
        assert slow.is_published and later.is_published
        assert writing.pid == writer
        assert not (tmp_path / "waiting").exists()
    finally:
        writing.close()
        stager.close()


def test_a_save_given_up_before_it_is_handed_over_is_not_written(tmp_path: Path) -> None:
    stager = Stager()
    writing = Writing(0, stager.buffers, patience_s=60.0)
    early, later = (_save(tmp_path / str(i), buffer) for i, buffer in enumerate(stager.buffers))

    def heard() -> bool:
        writing.hear([early, later], 0.1)
        return later.outcome is not None

    try:
        writing.give_up(early, [early, later])
        writing.send(early)
        writing.send(later)
        wait_until(heard)
        assert later.is_published
        assert early.outcome is None and not (tmp_path / "0").exists()
    finally:
        writing.close()
        stager.close()
