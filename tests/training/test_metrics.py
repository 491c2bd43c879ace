"""metrics.jsonl, events.jsonl and the progress line."""

from __future__ import annotations

import errno
import io
import json
import os
import threading
from pathlib import Path

import pytest
from rich.console import Console

from shoal.errors import Unavailable, WorkError
from shoal.training import (
    EventKind,
    EventReader,
    MetricsReader,
    MetricsWriter,
    ProgressLine,
    append_event,
)
from shoal.training.lines import writing
from tests.short_disk import file_size_limit
from tests.training.tiny import metrics_of


def _steps(folder: Path) -> list[tuple[int, float]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [(json.loads(line)["step"], json.loads(line)["loss"]) for line in lines]


def test_each_step_occurs_once_after_a_resume(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, last_step=0) as writer:
        for step in (1, 2, 3):
            writer.write(metrics_of(step))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # the crash came in the middle of a line
    with MetricsWriter(tmp_path, last_step=2) as writer:
        writer.write(metrics_of(3, loss=9.0))
    assert _steps(tmp_path) == [(1, 2.5), (2, 2.5), (3, 9.0)]


def test_a_line_is_visible_as_soon_as_it_is_written(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, last_step=0) as writer:
        writer.write(metrics_of(1))
        assert _steps(tmp_path) == [(1, 2.5)]
    assert list((tmp_path / "tensorboard").glob("events.out.tfevents.*"))


def test_a_reader_follows_and_notices_a_cut(tmp_path: Path) -> None:
    reader = MetricsReader(tmp_path)
    assert reader.poll() == []
    with MetricsWriter(tmp_path, last_step=0) as writer:
        for step in (1, 2, 3):
            writer.write(metrics_of(step))
        assert [metrics.step for metrics in reader.poll()] == [1, 2, 3]
        writer.write(metrics_of(4))
        assert reader.poll() == [metrics_of(4)]
    with MetricsWriter(tmp_path, last_step=1) as writer:
        for step in (2, 3, 4, 5):
            writer.write(metrics_of(step, loss=1.25))
        assert [(metrics.step, metrics.loss) for metrics in reader.poll()] == [(5, 1.25)]
        writer.write(metrics_of(6))
        assert [metrics.step for metrics in reader.poll()] == [6]


def test_an_unwritable_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(WorkError, match="missing"):
        MetricsWriter(tmp_path / "missing", last_step=0)
    with pytest.raises(WorkError, match="missing"):
        append_event(tmp_path / "missing", EventKind.START)


@pytest.mark.parametrize(
    ("number", "is_passing"),
    [(errno.ESTALE, True), (errno.ETIMEDOUT, True), (errno.EROFS, False), (errno.ENOSPC, False)],
)
def test_a_disk_whose_server_is_away_may_come_back(number: int, is_passing: bool) -> None:
    """So another attempt is made, unlike after what would happen again."""
    with pytest.raises(WorkError, match=f"cannot write a: {os.strerror(number)}") as refused:
        with writing(Path("a")):
            raise OSError(number, os.strerror(number))
    assert isinstance(refused.value, Unavailable) is is_passing


def test_a_disk_that_fills_costs_the_event_that_found_no_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    append_event(tmp_path, EventKind.START)
    path = tmp_path / "events.jsonl"
    with file_size_limit(path.stat().st_size + 20):
        with pytest.raises(WorkError, match=r"cannot write .*/events\.jsonl: File too large"):
            append_event(tmp_path, EventKind.FAILURE, rank=0)
    reader = EventReader(tmp_path)
    assert [event["event"] for event in reader.poll()] == ["start"]
    append_event(tmp_path, EventKind.SAVE, step=4)
    append_event(tmp_path, EventKind.END)
    assert [event["event"] for event in reader.poll()] == ["save", "end"]
    assert [event["event"] for event in EventReader(tmp_path).poll()] == ["start", "save", "end"]
    assert 'no whole line: b\'{"time"' in caplog.text


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_disk_that_fills_is_the_cause_that_ends_the_run(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with pytest.raises(WorkError, match=r"cannot write .*/metrics\.jsonl: File too large"):
        with MetricsWriter(tmp_path, last_step=0) as writer:
            writer.write(metrics_of(1))
            with file_size_limit(path.stat().st_size + 20):
                writer.write(metrics_of(2))
    _await_tensorboard()
    assert path.read_bytes().count(b"\n") == 1 and not path.read_bytes().endswith(b"\n")
    with MetricsWriter(tmp_path, last_step=1) as writer:
        writer.write(metrics_of(2))
    assert _steps(tmp_path) == [(1, 2.5), (2, 2.5)]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_refusal_of_tensorboards_files_names_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(WorkError, match=r"cannot write .*/tensorboard: File too large"):
        with file_size_limit(2000), MetricsWriter(tmp_path, last_step=0) as writer:
            for step in range(1, 12):  # they take three times what metrics.jsonl takes
                writer.write(metrics_of(step))
    assert "tensorboard ends early" in caplog.text
    _await_tensorboard()


def _await_tensorboard() -> None:
    """Its thread writes when it likes; what it is refused is to be raised in this test."""
    for thread in threading.enumerate():
        if type(thread).__module__.startswith("tensorboard"):
            thread.join(10)


def test_events_keep_their_order_and_fields(tmp_path: Path) -> None:
    assert EventReader(tmp_path).poll() == []
    append_event(tmp_path, EventKind.START, attempt=1)
    append_event(tmp_path, EventKind.SAVE, step=4)
    events = EventReader(tmp_path).poll()
    assert [(event["event"], event.get("step")) for event in events] == [
        ("start", None),
        ("save", 4),
    ]
    assert all(event["time"].endswith("+00:00") for event in events)


def test_plain_lines_are_rare_and_the_last_step_has_one() -> None:
    output = io.StringIO()
    with ProgressLine(Console(file=output, width=40), num_steps=30) as progress:
        for step in range(1, 31):
            progress.show(metrics_of(step, step_seconds=1.0))
    lines = output.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/30", "11/30", "21/30", "30/30"]
    assert lines[0] == "step 1/30  loss 2.5000  128 tokens/s  00:29 left"


def test_a_terminal_line_is_rewritten() -> None:
    output = io.StringIO()
    console = Console(file=output, width=80, force_terminal=True)
    with ProgressLine(console, num_steps=2000) as progress:
        progress.show(metrics_of(1, step_seconds=4.0))
        progress.show(metrics_of(2, step_seconds=4.0))
    assert "2:13:12 left" in output.getvalue()
    assert "\x1b[2K" in output.getvalue()
