"""The journal's files: full disks, torn ends, several processes, and a kill."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from shoal.config import JournalSettings
from shoal.errors import ConfigError, WorkError
from shoal.inference.journal import (
    Began,
    Grew,
    JournaledEngine,
    Segments,
    open_journal,
    read_answers,
    read_journal,
)
from shoal.inference.journal.records import encode
from shoal.inference.journal.segments import create
from tests.actors.scripted_engine import ScriptedEngine
from tests.inference.scripted_store import FACTS, asked


class FullFile:
    """A file on a disk that has room for ``room[0]`` more bytes."""

    def __init__(self, path: Path, room: list[int]) -> None:
        self._file = create(path)
        self._room = room

    def write(self, data: memoryview, /) -> int:
        if self._room[0] == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = self._file.write(data[: self._room[0]])
        self._room[0] -= count
        return count

    def truncate(self, size: int, /) -> int:
        return self._file.truncate(size)

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        self._file.close()


def test_a_full_disk_leaves_no_half_records(tmp_path: Path) -> None:
    room = [10**6]
    segments = Segments(
        tmp_path,
        segment_bytes=10**6,
        facts=FACTS,
        create=lambda path: FullFile(path, room),
    )
    first, second = (
        encode(Grew(request_id="r", choice=0, position=place, token_ids=(place,)))
        for place in range(2)
    )
    began = encode(Began(request=asked("r"), time=0.0))
    segments.append(began + first, sync=True)
    for left in (0, 10):  # some of it fits, then in the next segment not even the header
        room[0] = left
        with pytest.raises(OSError, match="No space left"):
            segments.append(second, sync=True)
        assert [path.name for path in tmp_path.iterdir()] == ["segment-00000001.journal"]
    size = (tmp_path / "segment-00000001.journal").stat().st_size
    room[0] = 10**6
    segments.append(second, sync=True)
    segments.close()
    assert (tmp_path / "segment-00000001.journal").stat().st_size == size
    assert (tmp_path / "segment-00000002.journal").exists()
    assert read_answers(tmp_path)["r"].tokens == {0: [0, 1]}


def test_a_failed_sync_has_everything_stored_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    segments = Segments(tmp_path, segment_bytes=10**6, facts=FACTS)
    began = encode(Began(request=asked("r"), time=0.0))
    grew = encode(Grew(request_id="r", choice=0, position=0, token_ids=(4, 5), finish_reason="x"))

    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="Input/output"):
            segments.append(began, sync=True)
    segments.append(began, sync=True)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="Input/output"):
            segments.append(grew, sync=True)
    segments.append(grew, sync=True)
    segments.append(grew, sync=True)  # stored twice counts once
    segments.close()
    answer = read_answers(tmp_path)["r"]
    assert answer.tokens == {0: [4, 5]} and answer.finish_reasons == {0: "x"}


def test_two_processes_share_a_folder_without_mixing(tmp_path: Path) -> None:
    stores = [Segments(tmp_path, segment_bytes=1, facts=FACTS) for _ in range(2)]
    for number in range(6):
        line = encode(Began(request=asked(f"r{number}"), time=0.0))
        stores[number % 2].append(line, sync=False)
    for store in stores:
        store.close()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"segment-{number:08d}.journal" for number in range(1, 7)]
    assert list(read_answers(tmp_path)) == [f"r{number}" for number in range(6)]


def test_old_segments_are_kept_up_to_a_size(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [encode(Began(request=asked(f"r{number}"), time=0.0)) for number in range(8)]

    def write(numbers: range, keep_bytes: int | None) -> list[str]:
        segments = Segments(tmp_path, segment_bytes=1, keep_bytes=keep_bytes, facts=FACTS)
        for number in numbers:
            segments.append(lines[number], sync=True)
        segments.close()
        return list(read_answers(tmp_path))

    assert write(range(4), None) == ["r0", "r1", "r2", "r3"]
    size = (tmp_path / "segment-00000001.journal").stat().st_size
    # What an earlier process has left counts as well.
    assert write(range(4, 5), 5 * size // 2) == ["r2", "r3", "r4"]
    assert write(range(5, 6), 3 * size // 2) == ["r4", "r5"]

    def refuse(path: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        assert write(range(6, 7), 0) == ["r4", "r5", "r6"]
    assert "cannot be deleted: [Errno 1] Operation not permitted" in caplog.text
    assert write(range(7, 8), 0) == ["r7"]


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_torn_end_is_passed_over_and_damage_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, cut: int
) -> None:
    path = tmp_path / "segment-00000001.journal"
    segments = Segments(tmp_path, segment_bytes=10**6, facts=FACTS)
    lines = [encode(Began(request=asked(f"r{number}"), time=0.0)) for number in range(3)]
    segments.append(b"".join(lines), sync=False)
    segments.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    assert list(read_answers(tmp_path)) == ["r0", "r1"] and caplog.text == ""
    path.write_bytes(whole.replace(b'"r1"', b'"r9"'))
    assert list(read_answers(tmp_path)) == ["r0", "r2"]
    assert "1 damaged lines are passed over" in caplog.text


def test_another_format_is_refused(tmp_path: Path) -> None:
    line = b'{"format":2}'
    (tmp_path / "segment-00000001.journal").write_bytes(b"%08x %s\n" % (zlib.crc32(line), line))
    with pytest.raises(WorkError, match="format 2, and 1 is understood"):
        list(read_journal(tmp_path))


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    settings = JournalSettings(dir=str(tmp_path / "file"))
    with pytest.raises(
        ConfigError, match=r"serve.journal.dir = .*engine-0 cannot be used: Not a dir"
    ):
        open_journal(settings, 0, facts=FACTS)


def test_all_that_was_acknowledged_survives_a_kill(tmp_path: Path) -> None:
    """A process that journals as fast as it can is killed while it writes."""
    program = """
import sys
from pathlib import Path
from tests.inference.test_journal_files import talk
talk(Path(sys.argv[1]))
"""
    command = [sys.executable, "-c", program, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    acknowledged = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, env=environment, text=True, cwd=os.getcwd()
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            acknowledged.append(line.strip())
            if len(acknowledged) == 200:
                process.send_signal(signal.SIGKILL)
    answers = read_answers(tmp_path)
    assert len(acknowledged) >= 200
    for name in acknowledged:
        assert answers[name].tokens == {0: list(range(20, 0, -1))}
        assert answers[name].finish_reasons == {0: "length"}
    for answer in answers.values():  # and of the others there is a beginning
        tokens = answer.tokens.get(0, [])
        assert tokens == list(range(20, 20 - len(tokens), -1))


def talk(folder: Path) -> None:
    """Serve durable requests for ever and print the name of each that is on the disk."""
    settings = JournalSettings(dir=str(folder), fsync="always", segment_bytes=20_000)
    journal = open_journal(settings, 0, facts=FACTS)
    engine = JournaledEngine(ScriptedEngine(), journal)
    journal.start()
    number = 0
    while True:
        if journal.stats().pending < 1000:
            engine.add(asked(f"r{number}", 20, durable=True))
            number += 1
        for output in engine.step() if engine.has_work else ():
            if output.durable:
                sys.stdout.write(f"{output.request_id}\n")
                sys.stdout.flush()
