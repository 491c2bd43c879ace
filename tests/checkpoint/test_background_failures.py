"""Disks that refuse, and ranks that are killed, while steps are saved in the background."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import termios
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shoal.checkpoint import OnFailure, State, clean, load, newest, save, steps, verify
from shoal.errors import WorkError
from shoal.storage import Abandon, Outcome, Place, WriteJob, discard, medium_of, new_token
from shoal.storage.writer import Writer
from tests.checkpoint.disks import device, mounted
from tests.checkpoint.plain import model_of, trained
from tests.checkpoint.saving import training, wait_until
from tests.ranks import RankPool
from tests.short_disk import file_size_limit


def _fail_on_one_rank(folder: Path, failing: int) -> str:
    """One rank's writer gets a short write and then a refusal; what this rank is told."""
    try:
        with ExitStack() as stack:
            with file_size_limit(2000 if dist.get_rank() == failing else 2**40):
                trainer = stack.enter_context(training(folder))  # its writer keeps the limit
            trainer.save(2)
            trainer.step()
            trainer.saver.drain()
    except WorkError as error:
        return str(error)
    return "saved"


def _save_one(folder: Path, step: int) -> None:
    with training(folder) as trainer:
        trainer.save(step)
        trainer.saver.drain()


def _assert_loads(path: Path) -> None:
    model = model_of(9)
    load(path, model=model, optimizer=trained(model, num_steps=0))
    assert torch.equal(model.get_parameter("2.bias"), _trained_bias())


def _trained_bias() -> torch.Tensor:
    model = model_of(1)
    trained(model, num_steps=1)
    return model.get_parameter("2.bias").detach()


@pytest.mark.parametrize("failing", [0, 1])
def test_a_short_write_then_a_refused_one_reaches_every_rank(
    ranks: RankPool, tmp_path: Path, failing: int
) -> None:
    ranks.run(2, _save_one, tmp_path, 1)
    messages = ranks.run(2, _fail_on_one_rank, tmp_path, failing)
    assert messages[0] == messages[1]
    assert f"__{failing}_0.distcp could not be written: File too large" in messages[0]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    _assert_loads(tmp_path / "step-00000001")


@dataclass
class _Rank:
    """A rank at the other end of a writer's connection, whose publisher fails in mid-write."""

    job: WriteJob
    looks: int = 0
    outcomes: list[Outcome] = field(default_factory=list)

    def recv(self) -> WriteJob | Abandon:
        if self.outcomes:
            raise EOFError
        return self.job if not self.looks else Abandon(token=self.job.place.token)

    def poll(self) -> bool:
        self.looks += 1
        if self.looks == 2:  # the file is open by now
            discard(self.job.place.draft)
        return self.looks == 4

    def send(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)


def test_a_folder_that_the_publisher_took_away_is_no_cause(tmp_path: Path) -> None:
    place = Place(folder=tmp_path, step=1, token=new_token())
    medium_of(tmp_path).begin(place.draft)
    with tempfile.TemporaryFile() as memory:
        memory.write(b"7" * 100)
        memory.flush()
        job = WriteJob(
            place=place,
            name="__1_0.distcp",
            descriptor=memory.fileno(),
            num_bytes=100,
            patience_s=60,
            publication=None,
        )
        rank = _Rank(job)
        with pytest.raises(EOFError):
            Writer(cast(Connection, rank)).serve()
    assert [outcome.error for outcome in rank.outcomes] == ["it was given up"]


def test_a_full_disk_costs_the_steps_that_find_no_room(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=256k", "tmpfs") as disk:
        with training(disk, on_failure=OnFailure.WARN) as trainer:
            trainer.save(1)
            trainer.saver.drain()
            (disk / "filler").write_bytes(bytes(os.statvfs(disk).f_bavail * 4096 - 40960))
            trainer.step()
            trainer.save(2)
            trainer.step()
            trainer.save(3)
            _assert_loads(disk / "step-00000001")
            wait_until(lambda: trainer.saver.num_under_way(poll=True) == 0)
            (disk / "filler").unlink()
            trainer.step()
            trainer.save(4)
            trainer.saver.drain()
        assert [step.number for step in steps(disk)] == [1, 4]
        assert {path.name[:5] for path in disk.iterdir()} == {"step-"}
    told = trainer.errors()
    assert [step for step, _, _ in told] == [1, 2, 3, 4]
    assert all("No space left" in str(e) or "has no room" in str(e) for _, e, _ in told[1:3])


def test_a_disk_that_became_read_only_is_told_and_its_step_still_loads(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "-t", "tmpfs", "tmpfs") as disk:
        with pytest.raises(WorkError, match="could not be written: Read-only file system"):
            with training(disk) as trainer:
                trainer.save(1)
                trainer.saver.drain()
                subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
                trainer.save(2)
                trainer.saver.drain()
        _assert_loads(disk / "step-00000001")
        assert [step.number for step in steps(disk)] == [1]


_BLOCK_NUMBER, _BLOCK_SIZE = 1, 2
"""Linux's FIBMAP, where on the device a file's first block lies, and FIGETBSZ."""


def test_a_disk_that_fails_to_write_costs_the_steps_from_then_on(tmp_path: Path) -> None:
    """A block device in memory that is sealed in the middle: every write to it is EIO."""
    memory, disk = os.memfd_create("disk", os.MFD_ALLOW_SEALING), tmp_path / "disk"
    try:
        os.ftruncate(memory, 8 * 2**20)
        with device(f"/proc/{os.getpid()}/fd/{memory}", disk):
            with pytest.raises(WorkError, match="could not be written: Input/output error"):
                with training(disk, keep=1) as trainer:
                    trainer.save(1)
                    trainer.saver.drain()
                    os.sync()
                    fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
                    trainer.step()
                    trainer.save(2)
                    trainer.saver.drain()
            assert [step.number for step in steps(disk)] == [1]
            _assert_loads(disk / "step-00000001")
    finally:
        os.close(memory)


def test_a_disk_that_fails_to_read_is_told_by_every_command(tmp_path: Path) -> None:
    """A block device whose end is gone: every read from there is EIO."""
    image, disk = tmp_path / "image", tmp_path / "disk"
    with image.open("wb") as file:
        file.truncate(16 * 2**20)
    with device(image, disk, "--direct-io=on"):
        _save_one(disk, 1)
        model = nn.Embedding(1000, 1500)
        save(disk, 2, model=model, optimizer=None, counters={})
        shard = disk / "step-00000002" / "__0_0.distcp"
        with shard.open("rb") as file:
            size, first = (
                int.from_bytes(fcntl.ioctl(file, request, bytes(4)), sys.byteorder)
                for request in (_BLOCK_SIZE, _BLOCK_NUMBER)
            )
            os.truncate(image, first * size)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        problem = f"{shard} cannot be read: Input/output error"
        assert [str(damage) for damage in verify(shard.parent)] == [problem]
        with pytest.raises(WorkError, match=problem):
            load(shard.parent, model=model, optimizer=None)
        _assert_loads(disk / "step-00000001")


def _train_until_killed(folder: Path, connection: Connection) -> None:
    with training(folder) as trainer:
        trainer.save(1)
        trainer.saver.drain()
        os.kill(trainer.saver.writer_pid, signal.SIGSTOP)
        trainer.save(2)
        trainer.step()
        connection.send(trainer.saver.writer_pid)
        signal.pause()


@pytest.mark.parametrize("is_writing", [False, True])
def test_a_killed_rank_takes_its_writer_along_and_publishes_nothing_later(
    tmp_path: Path, is_writing: bool
) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_train_until_killed, args=(tmp_path, theirs))
    process.start()
    theirs.close()
    writer = ours.recv()
    if is_writing:
        # It is at a save whose folder a new attempt has put away meanwhile.
        os.kill(writer, signal.SIGCONT)
    process.kill()
    process.join()
    process.close()
    ours.close()
    if not is_writing:
        os.kill(writer, signal.SIGCONT)
    wait_until(lambda: not Path(f"/proc/{writer}").exists())
    clean(tmp_path)
    found = [step.number for step in steps(tmp_path)]
    assert found == [1] if not is_writing else found in ([1], [1, 2])
    assert {path.name[:5] for path in tmp_path.iterdir()} == {"step-"}
    last = newest(tmp_path)
    assert last is not None and verify(last.path) == ()


def test_a_new_attempt_shuts_an_old_writer_out(tmp_path: Path) -> None:
    """What is cleaned away before a start cannot be published after it."""
    with pytest.raises(WorkError, match="No such file or directory"):
        with training(tmp_path) as trainer:
            trainer.save(1)
            trainer.saver.drain()
            blocked = tmp_path / "attached"
            os.mkfifo(blocked)
            state = State(
                model=trainer.model,
                optimizer=trainer.optimizer,
                counters={},
                attachments={"slow": blocked},  # the publisher waits here for somebody to write
            )
            trainer.saver.save(2, state)
            wait_until(lambda: any(tmp_path.glob(".step-*/.metadata")))
            assert len(clean(tmp_path)) == 1
            descriptor = os.open(blocked, os.O_RDWR)  # does not wait for the other end
            os.write(descriptor, b"at last")
            wait_until(lambda: not any(fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4))))
            os.close(descriptor)
            trainer.saver.drain()
    assert [step.number for step in steps(tmp_path)] == [1]
