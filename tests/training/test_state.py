"""What ranks wait for is a disk, which may take longer than a collective of the training."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist

from shoal.checkpoint import Location
from shoal.training import TrainJob
from shoal.training.state import RunState
from tests.checkpoint.plain import model_of, save_plain
from tests.ranks import RankPool
from tests.training.tiny import make_config, make_job, write_text


def _look(job: TrainJob) -> list[Location | None]:
    """Where to begin and where to go back to, by a first rank that comes late."""
    patient = dist.new_group(backend="gloo", timeout=timedelta(seconds=60))
    dist.distributed_c10d._set_pg_timeout(timedelta(milliseconds=1), dist.group.WORLD)
    rest: Any = None
    state = RunState(
        job=job,
        rank=dist.get_rank(),
        patient=cast(dist.ProcessGroup, patient),
        model=rest,
        optimizer=rest,
        sampler=rest,
        guard=rest,
        attachments={},
    )
    found = []
    for look in (state.choose, state.newest):
        if state.rank == 0:
            time.sleep(0.3)
        found.append(look())
    return found


def test_ranks_wait_for_the_first_to_look_as_long_as_for_a_disk(
    tmp_path: Path, ranks: RankPool
) -> None:
    write_text(tmp_path / "text.txt")
    job = make_job(make_config(tmp_path, cluster={"workers": 2, "device": "cpu"}))
    saved = save_plain(job.folder.checkpoints, 1, model_of(1)).path
    assert ranks.run(2, _look, job) == 2 * [[saved, saved]]
