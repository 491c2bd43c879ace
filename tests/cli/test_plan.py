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
