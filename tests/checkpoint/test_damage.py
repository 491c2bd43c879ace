"""Whatever happens to a published checkpoint's files is found and named, and nothing is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from shoal.checkpoint import load, newest, save, steps, verify
from shoal.errors import WorkError
from tests.checkpoint.plain import model_of, save_plain, trained

FILES = (".metadata", "__0_0.distcp", "index.json", "manifest.json")


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """A folder with steps 1 and 2."""
    for step in (1, 2):
        save_plain(tmp_path, step, model_of(step))
    return tmp_path


def _flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b" ")


def _refused(path: Path, *, is_read: bool = False) -> str:
    """The message of a load, which must leave the weights as they were, or if ``is_read`` none."""
    model = model_of(9)
    before = [value.clone() for value in model.parameters()]
    optimizer = trained(model, num_steps=0)
    with pytest.raises(WorkError) as caught:
        load(path, model=model, optimizer=optimizer)
    for old, new in zip(before, model.parameters(), strict=True):
        assert new.isnan().all() if is_read else torch.equal(old, new)
    return str(caught.value)


def test_a_whole_checkpoint_has_no_damage(checkpoints: Path) -> None:
    assert verify(checkpoints / "step-00000002") == ()


@pytest.mark.parametrize("part", [0.0, 0.37, 0.5, 0.98])
@pytest.mark.parametrize("name", FILES)
def test_one_flipped_bit_is_found(checkpoints: Path, name: str, part: float) -> None:
    file = checkpoints / "step-00000002" / name
    _flip(file, int(part * file.stat().st_size))
    assert [damage.file for damage in verify(file.parent)] == [file]
    assert str(file) in _refused(file.parent, is_read=name == "__0_0.distcp")


def test_a_load_that_fails_half_way_leaves_no_half_of_it_and_another_step_heals(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file of several blocks, of which the last is damaged, once the first is in its place."""
    model = nn.Embedding(1000, 3000)
    for step in (1, 2):
        save(tmp_path, step, model=model, optimizer=None, counters={})
    _flip(tmp_path / "step-00000002" / "__0_0.distcp", 11 * 2**20)
    fresh = nn.Embedding(1000, 3000)
    with pytest.raises(WorkError, match="checksum in bytes 8388608 to"):
        load(tmp_path / "step-00000002", model=fresh, optimizer=None)
    assert fresh.weight.isnan().all()
    assert "read in part" in caplog.text
    load(tmp_path / "step-00000001", model=fresh, optimizer=None)
    assert torch.equal(fresh.weight, model.weight)


@pytest.mark.parametrize("harm", [Path.unlink, _truncate, _lengthen])
@pytest.mark.parametrize("name", FILES[:3])
def test_a_file_of_another_size_makes_the_step_incomplete(
    checkpoints: Path, name: str, harm: Callable[[Path], None]
) -> None:
    file = checkpoints / "step-00000002" / name
    harm(file)
    assert [damage.file for damage in verify(file.parent)] == [file]
    assert str(file) in _refused(file.parent)
    assert [step.number for step in steps(checkpoints)] == [1]


@pytest.mark.parametrize(
    "harm",
    [
        Path.unlink,
        lambda path: path.write_text(path.read_text()[:50]),
        lambda path: path.write_text("[" * 100_000),
    ],
)
def test_a_step_without_a_whole_manifest_is_passed_over(
    checkpoints: Path, harm: Callable[[Path], None]
) -> None:
    file = checkpoints / "step-00000002" / "manifest.json"
    harm(file)
    assert [damage.file for damage in verify(file.parent)] == [file]
    assert str(file) in _refused(file.parent)
    last = newest(checkpoints)
    assert last is not None and last.number == 1
    model = model_of(9)
    assert load(last.path, model=model, optimizer=trained(model, num_steps=0)).step == 1


def test_the_manifest_of_a_later_release_is_refused_as_such(checkpoints: Path) -> None:
    file = checkpoints / "step-00000002" / "manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "version": 3}))
    assert "version 3" in _refused(file.parent)


def test_a_step_under_another_steps_name_is_passed_over(checkpoints: Path) -> None:
    (checkpoints / "step-00000002").rename(checkpoints / "step-00000003")
    assert [step.number for step in steps(checkpoints)] == [1]
