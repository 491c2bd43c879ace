"""The driver of a run on a Ray that exists: how runs end, and what is refused at the start."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.checkpoint import RunFolder, export, newest
from shoal.config import Config, config_from_tree, dump_config, load_config
from shoal.errors import ConfigError, EndedEarly, WorkError
from shoal.models import Decoder, HFWeights, load_weights
from shoal.plan import Machine, make_plan
from shoal.training import EventReader, MetricsReader, train
from shoal_actors.driver import Cluster
from shoal_actors.train import Gang, run
from shoal_actors.train.checks import check_places, check_room
from shoal_actors.train.paths import with_absolute_paths
from tests.actors.places import cluster_of
from tests.checkpoint.bucket import serving
from tests.ranks import RankPool
from tests.training.tiny import MIXTURE, MODEL, make_config, make_job, write_text

MACHINE = Machine(has_cuda=False, cpu_has_bf16=False)


def _config(folder: Path, **sections: dict[str, Any]) -> Config:
    write_text(folder / "text.txt")
    return make_config(folder, **sections)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A run of two workers that share experts, which its data ended."""

    config: Config
    folder: Path
    error: EndedEarly
    output: str


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory, ray_session: Cluster) -> Ended:
    place = tmp_path_factory.mktemp("ended")
    write_text(place / "text.txt", num_bytes=400)
    config = make_config(
        place,
        model={"config": MIXTURE},
        data={"epochs": 1},
        train={"steps": 500},
        optimizer={"kind": "sgd", "lr": 0.1},
        cluster={"workers": 2, "device": "cpu"},
        parallel={"expert": 2},
    )
    output = io.StringIO()
    with redirect_stdout(output), pytest.raises(EndedEarly) as ending:
        run(config)
    folder = place / "runs" / "run"
    return Ended(config=config, folder=folder, error=ending.value, output=output.getvalue())


def test_a_run_ends_early_when_its_data_does(ended: Ended) -> None:
    assert ended.error.exit_code == 3
    last = newest(ended.folder / "checkpoints")
    assert last is not None and last.number > 2
    assert f"The data ended after step {last.number} of 500" in str(ended.error)
    assert [e["event"] for e in EventReader(ended.folder).poll()] == ["start", "save", "end"]
    assert load_config(ended.folder / "config.yaml") == ended.config
    assert "computing in float32 (as asked)" in ended.output
    assert "step 1/500  loss" in ended.output

    # Its steps are all made: nothing is left to do for fewer, and never refuses the folder.
    done = ended.config.train.model_copy(update={"steps": last.number})
    assert run(ended.config.model_copy(update={"train": done})) == 0
    never = ended.config.checkpoint.model_copy(update={"resume": "never"})
    with pytest.raises(ConfigError, match=r"checkpoint\.resume = 'never'"):
        run(ended.config.model_copy(update={"checkpoint": never}))


def test_workers_that_share_experts_train_what_one_rank_does(
    ended: Ended, tmp_path: Path, ranks: RankPool
) -> None:
    update = {
        "run": ended.config.run.model_copy(update={"dir": str(tmp_path)}),
        "cluster": ended.config.cluster.model_copy(update={"workers": 1}),
        "parallel": ended.config.parallel.model_copy(update={"expert": 1}),
    }
    ranks.run(1, train, make_job(ended.config.model_copy(update=update)))
    losses, logits = [], []
    for folder in (tmp_path / "run", ended.folder):
        losses.append([metrics.loss for metrics in MetricsReader(folder).poll()])
        last = newest(folder / "checkpoints")
        assert last is not None
        export(last.path, folder / "export", dtype=torch.float32)
        weights = HFWeights(folder / "export")
        decoder = Decoder(weights.config, torch.float32)
        load_weights(decoder, weights)
        output = decoder(torch.arange(24).unsqueeze(0))
        assert output.logits is not None
        logits.append(output.logits.detach())
    assert len(losses[0]) > 2 and losses[1] == pytest.approx(losses[0], rel=1e-5)
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-5, atol=1e-5)


def test_a_failure_that_would_repeat_ends_the_run(tmp_path: Path, ray_session: Cluster) -> None:
    config = _config(tmp_path, optimizer={"kind": "sgd", "lr": 1e30}, train={"steps": 9})
    with pytest.raises(WorkError, match=r"Rank 0 failed\. .*: Step [23]: the .* is (nan|inf)"):
        run(config)
    events = [event["event"] for event in EventReader(tmp_path / "runs" / "run").poll()]
    assert events == ["start", "failure", "end"]


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    config = _config(tmp_path)
    with RunFolder(tmp_path / "runs" / "run").lock():
        before = sorted(path.name for path in (tmp_path / "runs" / "run").iterdir())
        with pytest.raises(ConfigError, match=r"run\.name = 'run'"):
            run(config)
        assert sorted(path.name for path in (tmp_path / "runs" / "run").iterdir()) == before


def test_a_store_that_cannot_be_used_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with serving() as bucket:
        uri = f"s3://nowhere/runs?{bucket.options}"
        config = _config(tmp_path, checkpoint={"storage": uri})
        with pytest.raises(ConfigError, match=r"NO_SUCH_BUCKET.*Name a place that exists") as found:
            run(config)
    assert (found.value.field, found.value.value) == ("checkpoint.storage", uri)
    assert not (tmp_path / "runs" / "run" / "events.jsonl").exists()


def test_what_the_cluster_cannot_place_is_refused(tmp_path: Path, ray_session: Cluster) -> None:
    config = _config(tmp_path, cluster={"workers": 5, "device": "cpu"}, train={"global_batch": 5})
    with pytest.raises(ConfigError, match=r"cluster\.workers = 5: .* room for 4 workers of 1 CPU"):
        run(config)
    events = EventReader(tmp_path / "runs" / "run").poll()
    assert [event["event"] for event in events] == ["refusal"]


def test_a_missing_source_is_refused(tmp_path: Path, ray_session: Cluster) -> None:
    config = make_config(tmp_path)
    with pytest.raises(ConfigError, match=r"data\.sources\.0\.path"):
        run(config)


def test_places_are_counted_node_by_node() -> None:
    gang = Gang(num_workers=4, device="cuda", threads=3, timeout_s=1.0, silence_s=1.0)
    nodes = ({"CPU": 8.0, "GPU": 4.0}, {"CPU": 5.0, "GPU": 1.0}, {"CPU": 64.0})
    cluster = Cluster(is_own=False, nodes=nodes, limit=None)
    assert cluster.has_gpus and cluster.machine.has_cuda
    with pytest.raises(ConfigError, match="room for 3 workers of 3 CPU and 1 GPU"):
        check_places(gang, cluster, field="cluster.workers", domain=None)
    grown = replace(cluster, limit={"CPU": 100.0, "GPU": 8.0})
    check_places(gang, grown, field="cluster.workers", domain=None)


def test_nodes_that_always_tear_a_domain_are_refused() -> None:
    gang = Gang(num_workers=8, device="cpu", threads=1, timeout_s=1.0, silence_s=1.0)
    uneven = cluster_of(3, 3, 2)
    with pytest.raises(ConfigError, match=r"cluster\.nvlink_domain = 4: ranks 0 to 3 .* 2 nodes"):
        check_places(gang, uneven, field="cluster.workers", domain=4)
    check_places(gang, uneven, field="cluster.workers", domain=8)
    even = cluster_of(4, 4)
    for cluster in (
        replace(even, free=cluster_of(3, 3).free),  # others have some places, and may leave
        replace(cluster_of(5, 4), free=even.free),  # or have the one that is in the way
    ):
        check_places(gang, cluster, field="cluster.workers", domain=4)
    grown = replace(uneven, limit={"CPU": 100.0})
    check_places(gang, grown, field="cluster.workers", domain=4)


def test_a_disk_without_room_is_refused(tmp_path: Path) -> None:
    huge = {**MODEL, "hidden_size": 2**16, "intermediate_size": 2**18, "num_hidden_layers": 128}
    config = _config(tmp_path, model={"config": {**huge, "num_attention_heads": 512}})
    with pytest.raises(ConfigError, match=r"run\.dir = .*one checkpoint takes [\d,]{15,} bytes"):
        check_room(config, make_plan(config, MACHINE), RunFolder(tmp_path))


@dataclass(frozen=True, slots=True)
class _Disk(RunFolder):
    """A folder where so many bytes are free."""

    free: int = 0

    def room(self) -> int:
        return self.free


@pytest.mark.parametrize("kind", ["adamw", "sgd", "muon"])
def test_a_disk_needs_room_for_what_a_checkpoint_holds_and_no_more(
    tmp_path: Path, kind: str
) -> None:
    config = _config(tmp_path, optimizer={"kind": kind})
    plan = make_plan(config, MACHINE)
    assert plan.saves is not None
    needed = plan.saves.num_bytes
    check_room(config, plan, _Disk(tmp_path, free=needed))
    with pytest.raises(ConfigError, match=f"one checkpoint takes {needed:,} bytes"):
        check_room(config, plan, _Disk(tmp_path, free=needed - 1))


def test_paths_do_not_depend_on_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = config_from_tree(
        {
            "model": {"path": "model"},
            "data": {"sources": [{"path": "a/*.txt"}], "tokenizer": "words"},
            "train": {"steps": 1},
            "checkpoint": {"resume": "runs/x"},
        }
    )
    absolute = with_absolute_paths(config)
    assert absolute.model.path == str(tmp_path / "model")
    assert absolute.data.sources[0].path == str(tmp_path / "a" / "*.txt")
    assert absolute.data.tokenizer == str(tmp_path / "words")
    assert absolute.checkpoint.resume == str(tmp_path / "runs" / "x")
    assert absolute.run.dir == str(tmp_path / "runs")
    assert load_config_text(dump_config(absolute), tmp_path) == absolute
    words = make_config(tmp_path)
    assert with_absolute_paths(words) == words


def load_config_text(text: str, folder: Path) -> Config:
    (folder / "config.yaml").write_text(text)
    return load_config(folder / "config.yaml")
