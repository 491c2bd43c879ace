"""One run at a time writes into a folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.checkpoint import RunFolder
from shoal.errors import ConfigError, WorkError
from shoal.storage.owner import LOCK_NAME, STALE_S
from tests.checkpoint.saving import told_to_end

FOREIGN = {"host": "elsewhere", "pid": 7, "started": "2026-01-01T00:00:00"}

HOLDER = """
import sys, time
from pathlib import Path
from shoal.checkpoint.runfolder import RunFolder
with RunFolder(Path(sys.argv[1])).lock():
    print("held", flush=True)
    time.sleep(60)
"""


def _hold(path: Path) -> subprocess.Popen[str]:
    """Another process that holds the folder."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    return holder


def _write_foreign_lock(path: Path, age_s: float) -> None:
    path.mkdir()
    lock = path / LOCK_NAME
    lock.write_text(json.dumps(FOREIGN))
    then = lock.stat().st_mtime - age_s
    os.utime(lock, (then, then))


def test_a_folder_in_use_is_refused_with_its_holder_and_free_after_a_kill(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = RunFolder(tmp_path / "demo")
    holder = _hold(folder.path)
    try:
        with pytest.raises(ConfigError, match=f"process {holder.pid} on") as caught, folder.lock():
            pass
        assert caught.value.field == "run.name" and caught.value.value == "demo"
    finally:
        holder.kill()
        holder.communicate()
    with folder.lock():
        assert json.loads((folder.path / LOCK_NAME).read_text())["pid"] == os.getpid()
    assert f"taken over from process {holder.pid} on " in caplog.text
    assert (folder.path / LOCK_NAME).read_text() == ""


def test_the_lock_goes_with_its_block(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with pytest.raises(KeyError), folder.lock():
        raise KeyError
    with folder.lock(), pytest.raises(ConfigError), RunFolder(tmp_path).lock():
        pass
    with folder.lock():
        pass


def test_a_holder_on_another_host_is_believed_while_it_shows_signs_of_life(tmp_path: Path) -> None:
    _write_foreign_lock(tmp_path / "live", age_s=STALE_S / 2)
    with (
        pytest.raises(ConfigError, match="process 7 on elsewhere"),
        RunFolder(tmp_path / "live").lock(),
    ):
        pass
    assert "elsewhere" in (tmp_path / "live" / LOCK_NAME).read_text()
    _write_foreign_lock(tmp_path / "dead", age_s=STALE_S + 5)
    with RunFolder(tmp_path / "dead").lock():
        pass


def test_who_was_stopped_so_long_that_another_took_over_is_ended(tmp_path: Path) -> None:
    with pytest.raises(WorkError, match=f"{tmp_path} was taken over by process 7 on elsewhere"):
        with RunFolder(tmp_path).lock(), told_to_end():
            (tmp_path / LOCK_NAME).write_text(json.dumps(FOREIGN))
    assert json.loads((tmp_path / LOCK_NAME).read_text()) == FOREIGN, "it is the other's now"


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(WorkError, match="file/run cannot be written: Not a directory"),
        RunFolder(tmp_path / "file" / "run").lock(),
    ):
        pass


@pytest.mark.parametrize("text", [b"checkpoint: [", b"\xff\xfe", b"[" * 5000])
def test_a_damaged_configuration_does_not_hide_where_checkpoints_are(
    tmp_path: Path, text: bytes
) -> None:
    (tmp_path / "config.yaml").write_bytes(text)
    with pytest.raises(WorkError, match=r"config\.yaml, which says where .* cannot be read"):
        RunFolder.found(tmp_path)


def test_checkpoints_may_be_told_to_lie_in_the_run_s_own_folder(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    folder = RunFolder(tmp_path / "demo", f"file://{tmp_path}/link")
    with folder.lock():
        assert folder.checkpoints == tmp_path / "link" / "demo"
        with pytest.raises(ConfigError, match="in use"), folder.lock():
            pass
