"""``shoal plan`` in a process of its own."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

from tests.cli.shell import shoal, shoal_here, write_config


def test_text_and_picture(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    done = shoal("plan", str(config), "--svg", "plan.svg", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for title in ("Run run", "Mesh", "Ranks", "Memory of rank 0", "Collectives of a step"):
        assert title in done.stdout
    assert ElementTree.parse(tmp_path / "plan.svg").getroot().tag.endswith("svg")


def test_json_follows_overrides(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    overrides = ("--set", "cluster.workers=4", "--set", "cluster.nvlink_domain=2")
    done = shoal_here("plan", str(config), *overrides, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    assert (made["mesh"]["outer"], made["mesh"]["inner"]) == (2, 2)
    assert len(made["ranks"]) == 4
    assert "sizes" not in made


def test_sizes_that_a_cluster_may_choose(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    overrides = ("--set", "cluster.workers=4", "--set", "cluster.workers_min=2")
    batch = ("--set", "train.global_batch=4", "--set", "train.micro_batch=1")
    done = shoal_here("plan", str(config), *overrides, *batch, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    sizes = json.loads(done.stdout)["sizes"]
    assert [size["workers"] for size in sizes["feasible"]] == [2, 4]
    assert list(sizes["refused"]) == ["3"]
    done = shoal_here("plan", str(config), *overrides, *batch, cwd=tmp_path)
    assert "\nWorkers\n  workers  data-parallel" in done.stdout


def test_every_refusal_in_one_message(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    overrides = ("--set", "parallel.tensor=2", "--set", "data.seq_len=65")
    done = shoal_here("plan", str(config), *overrides, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    lines = done.stderr.splitlines()
    assert [line.partition(" = ")[0] for line in lines] == ["parallel.tensor", "data.seq_len"]
    assert not (tmp_path / "plan.svg").exists()


def test_a_picture_that_cannot_be_written(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    done = shoal_here("plan", str(config), "--svg", "no/folder/plan.svg", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "--svg = 'no/folder/plan.svg': the picture cannot be written there: No such file or "
        "directory. Give a file in a folder that you may write to.\n"
    )


def test_a_search_names_the_settings_of_a_plan_with_its_figures(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    gpus = ("--gpu", "H100", "--gpus", "4", "--json")
    done = shoal_here("plan", str(config), *gpus, "--search", "--top", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["best"]) == 2
    for best in found["best"]:
        overrides = [f"--set={key}={json.dumps(value)}" for key, value in best["set"].items()]
        done = shoal_here("plan", str(config), *gpus, *overrides, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        made = json.loads(done.stdout)
        assert made["time"]["total_s"] == best["time"]["total_s"]
        assert max(rank["peak_bytes"] for rank in made["ranks"]) == best["peak_bytes"]
        assert made["links"] == best["sent_bytes"]


def test_a_search_on_cpus_measures_them_and_draws_the_best(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    done = shoal_here("plan", str(config), "--search", "--svg", "best.svg", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for words in ("Best layouts of run on 1 x CPU", "Time of a step", "measured here", "Refused"):
        assert words in done.stdout
    assert ElementTree.parse(tmp_path / "best.svg").getroot().tag.endswith("svg")


def test_time_by_kind_of_gpu_or_by_measuring(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    assert "Time of a step" not in shoal_here("plan", str(config), cwd=tmp_path).stdout
    for options in (("--gpu", "gb200"), ("--measure",)):
        done = shoal_here("plan", str(config), *options, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "tokens a second" in done.stdout


def test_a_number_of_gpus_goes_with_their_kind(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    done = shoal_here("plan", str(config), "--gpus", "8", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("--gpus = 8: no kind of GPU is given")


def test_gpus_are_not_measured_with_a_search_either(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    for search in ((), ("--search",)):
        options = (*search, "--gpu", "H100", "--measure")
        done = shoal_here("plan", str(config), *options, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("--gpu = 'H100': --measure is of CPUs. Leave one of")


def test_memory_and_a_number_of_layouts_are_for_a_search(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    for name, value in (("--memory", "1.0"), ("--top", "3")):
        done = shoal_here("plan", str(config), name, value, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == (f"{name} = {value}: only a search has a use for it. Add --search.\n")
    done = shoal_here("plan", str(config), "--search", "--memory", "0.0001", cwd=tmp_path)
    assert done.returncode == 2
    assert "none of" in done.stderr and "fits into memory" in done.stderr
