"""``shoal train`` with its checkpoints in a store, killed at once in the middle of a save."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.checkpoint import Manifest, clean, steps, verify
from shoal.config import config_from_tree
from shoal.training import EventReader, train
from tests.checkpoint.bucket import Harm, serving
from tests.e2e.shoal_process import ShoalProcess
from tests.ranks import RankPool
from tests.training.tiny import config_tree, make_job, write_text


@pytest.mark.full
def test_a_run_killed_while_it_saves_goes_on_bit_for_bit(tmp_path: Path, ranks: RankPool) -> None:
    write_text(tmp_path / "text.txt", num_bytes=20_000)
    with serving() as bucket:
        tree = config_tree(
            tmp_path,
            cluster={"workers": 2, "device": "cpu"},
            train={"steps": 40, "global_batch": 8},
            checkpoint={"every": 4, "storage": bucket.uri("runs")},
        )
        calm = {**tree, "run": {**tree["run"], "name": "calm"}, "checkpoint": {"every": 4}}
        ranks.run(2, train, make_job(config_from_tree(calm)))
        (tmp_path / "run.yaml").write_text(json.dumps(tree))
        place = bucket.at("runs/run")

        def hold_the_second(method: str, path: str) -> Harm:
            is_index = method == "PUT" and path.endswith("index.json")
            return "hold" if is_index and "step-00000008" in path else None

        bucket.rule = hold_the_second
        with ShoalProcess(["train", "run.yaml"], tmp_path) as first:
            first.wait_for(lambda: bucket.held == 1)
            first.kill_all()
        bucket.rule = lambda method, path: None
        assert [step.number for step in steps(place)] == [4]
        assert any("step-00000008" in key for key in bucket.keys("runs/run"))
        with ShoalProcess(["train", "run.yaml"], tmp_path) as second:
            assert second.wait() == 0, second.output
            assert second.left_running() == []
        found, expected = steps(place), steps(tmp_path / "runs" / "calm" / "checkpoints")
        assert [step.number for step in found] == [36, 40]
        for ours, theirs in zip(found, expected, strict=True):
            assert Manifest.read(ours.path) == Manifest.read(theirs.path)
            assert verify(ours.path) == ()
        assert clean(place) == ()
        folders = {key.partition("/")[0] for key in bucket.keys("runs/run")}
        assert folders == {step.path.name for step in found}
        events = EventReader(tmp_path / "runs" / "run").poll()
        resumed = [event["path"] for event in events if event["event"] == "resume"]
        assert len(resumed) == 1 and "step-00000004" in resumed[0]
