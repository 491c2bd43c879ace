"""What the driver shows of what workers write."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from shoal.training import EventKind, MetricsWriter, append_event
from shoal_actors.train.follow import Follower
from tests.training.tiny import metrics_of


def test_only_what_this_command_does_is_shown(tmp_path: Path) -> None:
    append_event(tmp_path, EventKind.SAVE, step=1, num_bytes=1)
    with MetricsWriter(tmp_path, last_step=0) as writer:
        writer.write(metrics_of(1, loss=2.0, step_seconds=11.0))
    output = io.StringIO()
    with Follower(tmp_path, Console(file=output, width=60), num_steps=3, max_failures=2):
        append_event(tmp_path, EventKind.START, workers=[{"rank": 0}, {"rank": 1}])
        append_event(tmp_path, EventKind.RESUME, step=1, path="checkpoints/step-00000001")
        with MetricsWriter(tmp_path, last_step=1) as writer:
            writer.write(metrics_of(2, loss=2.0, step_seconds=11.0))
        append_event(tmp_path, EventKind.STRAGGLER, rank=1, message="last seen at sea", stack="")
        refusal = {"step": 3, "cause": "the loss is nan", "goes_on_from": 2, "num_skipped": 4}
        append_event(tmp_path, EventKind.SPOILED, **refusal)
        failure = {"rank": 1, "kind": "ValueError", "message": "[x]"}
        append_event(
            tmp_path, EventKind.FAILURE, is_final=False, **failure, in_a_row=1, pause_seconds=0.0
        )
        append_event(
            tmp_path, EventKind.FAILURE, is_final=False, **failure, in_a_row=2, pause_seconds=4.0
        )
        append_event(tmp_path, EventKind.WAIT, missing="2 places")
        append_event(tmp_path, EventKind.RESIZE, **{"from": 2, "to": 4, "cause": "there is room"})
        append_event(tmp_path, EventKind.NOTICE, cause="SIGTERM to rank 1")
        append_event(tmp_path, EventKind.SAVE, step=2, num_bytes=12345)
        append_event(tmp_path, EventKind.FAILURE, is_final=True, **failure)
    lines = output.getvalue().splitlines()
    assert [line for line in lines if not line.startswith("step")] == [
        "Training on 2 workers",
        "Going on from step 1 (checkpoints/step-00000001)",
        "Rank 1 is late: last seen at sea",
        "Step 3 was refused: the loss is nan. Going on from step 2 without 4 sequences",
        "Rank 1 failed. ValueError: [x] (1 in a row; 2 are recovered from)",
        "Rank 1 failed. ValueError: [x] (2 in a row; 2 are recovered from;"
        " the next attempt begins in 4 s)",
        "Waiting for room: 2 places",
        "Going on as 4 workers instead of 2: there is room",
        "Told to end: SIGTERM to rank 1",
        "Saved step 2: 12,345 bytes",
    ]
    assert [line for line in lines if line.startswith("step")] == [
        "step 2/3  loss 2.0000  128 tokens/s  00:11 left"
    ]


def test_a_step_that_an_earlier_command_made_is_not_shown(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, last_step=0) as writer:
        for step in (1, 2, 3):
            writer.write(metrics_of(step, loss=2.0))
    output = io.StringIO()
    with Follower(tmp_path, Console(file=output, width=60), num_steps=9, max_failures=2):
        append_event(tmp_path, EventKind.RESUME, step=2, path="checkpoints/step-00000002")
        with MetricsWriter(tmp_path, last_step=2):  # cuts off what will be made again
            pass
    assert output.getvalue() == "Going on from step 2 (checkpoints/step-00000002)\n"
