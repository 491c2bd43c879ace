"""What every file of the repository keeps to."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LONGEST_FILE = 400
PACKAGE_INDEX_OPTIONS = ("--index-" + "url", "--extra-index-" + "url")


def _tracked(*patterns: str) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--", *patterns], cwd=ROOT, capture_output=True, check=True
    )
    paths = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    return [path for path in paths if path.is_file()]


@pytest.fixture(autouse=True)
def _needs_a_checkout() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: nothing says which files are tracked")


def test_no_source_file_outgrows_one_noun() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines())
        for path in _tracked("platform", "actors", "deployments")
        if path.suffix == ".py"
    }
    assert lengths
    longer = {path: lines for path, lines in lengths.items() if lines > LONGEST_FILE}
    assert not longer


def test_no_file_names_this_machine_or_a_package_index() -> None:
    # A checkout at a folder as short as /src would match everywhere.
    machine = [f"{ROOT}/"] if len(ROOT.parts) > 2 else []
    for path in _tracked():
        text = path.read_bytes().decode(errors="ignore")
        for word in (*machine, *PACKAGE_INDEX_OPTIONS):
            assert word not in text, f"{path.relative_to(ROOT)} holds {word}"
