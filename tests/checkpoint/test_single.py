"""Saving and loading in one process, without any process group."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from shoal.checkpoint import Manifest, load, prune, save, steps, verify
from shoal.checkpoint.reading import CheckpointReader
from shoal.errors import ConfigError, WorkError
from shoal.storage import medium_of
from tests.checkpoint.disks import mounted
from tests.checkpoint.plain import local, model_of, save_plain, trained, whole_state


def _assert_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(actual[key], value), key


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.AdamW, {"amsgrad": True, "lr": torch.tensor(0.1)}),
        (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
        (torch.optim.SGD, {}),
    ],
)
@pytest.mark.parametrize("num_steps", [0, 3])
def test_every_state_comes_back(
    tmp_path: Path, kind: type[torch.optim.Optimizer], options: dict[str, object], num_steps: int
) -> None:
    model = model_of(1)
    optimizer = trained(model, num_steps=num_steps, kind=kind, **options)
    path = save(tmp_path, 3, model=model, optimizer=optimizer, counters={}).path
    fresh = model_of(2)
    theirs = trained(fresh, num_steps=0, kind=kind, **options)
    load(path, model=fresh, optimizer=theirs)
    _assert_equal(whole_state(fresh, theirs), whole_state(model, optimizer))
    assert all(parameter.grad is None for parameter in fresh.parameters())
    assert theirs.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_a_used_optimizer_is_overwritten(tmp_path: Path) -> None:
    model = model_of(1)
    optimizer = trained(model, num_steps=2)
    path = save(tmp_path, 2, model=model, optimizer=optimizer, counters={}).path
    other = model_of(2)
    theirs = trained(other, num_steps=5)
    load(path, model=other, optimizer=theirs)
    _assert_equal(whole_state(other, theirs), whole_state(model, optimizer))


def test_counters_come_back_as_they_were(tmp_path: Path) -> None:
    counters = {
        "step": 2**40,
        "rate": 0.1,
        "sampler": {"epoch": 3, "order": torch.arange(4), "names": ["a", None, True]},
    }
    model = model_of(1)
    path = save(tmp_path, 1, model=model, optimizer=None, counters=counters).path
    loaded = load(path, model=model, optimizer=None)
    assert torch.equal(loaded.counters["sampler"].pop("order"), torch.arange(4))
    counters["sampler"] = {"epoch": 3, "names": ["a", None, True]}
    assert loaded.counters == counters


def test_counters_that_could_run_code_are_refused_at_the_save(tmp_path: Path) -> None:
    model = model_of(1)
    # Megatron lets the unpickler take paths as soon as it is imported; we still do not.
    with torch.serialization.safe_globals([type(Path("x"))]):
        with pytest.raises(WorkError, match=r"counters\.at\.1\.lock.*PosixPath"):
            save(
                tmp_path,
                1,
                model=model,
                optimizer=None,
                counters={"at": [1, {"lock": Path("x")}]},
            )
    assert list(tmp_path.iterdir()) == []


def test_plain_dcp_reads_the_folder(tmp_path: Path) -> None:
    model = model_of(1)
    optimizer = trained(model, num_steps=2)
    path = save(tmp_path, 2, model=model, optimizer=optimizer, counters={"step": 2}).path
    dcp_to_torch_save(local(path), tmp_path / "all.pt")
    state = torch.load(tmp_path / "all.pt", weights_only=True)
    assert state["counters"] == {"step": 2}
    _assert_equal(state["model"], {k: v.detach() for k, v in model.named_parameters()})
    for name, parameter in model.named_parameters():
        _assert_equal(state["optimizer"][name], dict(optimizer.state[parameter]))


def test_compiled_models_save_plain_names(tmp_path: Path) -> None:
    model = model_of(1)
    compiled = torch.compile(model, backend="eager")
    assert isinstance(compiled, nn.Module)
    path = save(tmp_path, 1, model=compiled, optimizer=None, counters={}).path
    assert "model.0.weight" in FileSystemReader(local(path)).read_metadata().state_dict_metadata
    fresh = model_of(2)
    load(path, model=fresh, optimizer=None)
    _assert_equal(dict(fresh.named_parameters()), dict(model.named_parameters()))
    again = save(tmp_path, 2, model=fresh, optimizer=None, counters={}).path
    recompiled = torch.compile(model_of(3), backend="eager")
    assert isinstance(recompiled, nn.Module)
    load(again, model=recompiled, optimizer=None)
    assert torch.equal(next(recompiled.parameters()), next(model.parameters()))


def test_large_tensors_are_written_in_chunks(tmp_path: Path) -> None:
    model = nn.Embedding(1000, 20_000)
    path = save(tmp_path, 1, model=model, optimizer=None, counters={}).path
    stored = FileSystemReader(local(path)).read_metadata().state_dict_metadata["model.weight"]
    assert isinstance(stored, TensorStorageMetadata)
    assert [chunk.sizes[0] for chunk in stored.chunks] == [838, 162]
    fresh = nn.Embedding(1000, 20_000)
    load(path, model=fresh, optimizer=None)
    assert torch.equal(fresh.weight, model.weight)


def test_buffers_are_kept_and_temporary_ones_are_not(tmp_path: Path) -> None:
    model = nn.BatchNorm1d(3)
    model.register_buffer("scratch", torch.ones(2), persistent=False)
    model(torch.randn(4, 3))
    path = save(tmp_path, 1, model=model, optimizer=None, counters={}).path
    fresh = nn.BatchNorm1d(3)
    load(path, model=fresh, optimizer=None)
    _assert_equal(dict(fresh.named_buffers()), {k: getattr(model, k) for k in fresh._buffers})
    assert fresh.num_batches_tracked == 1


def test_moments_change_their_float_format(tmp_path: Path) -> None:
    model = model_of(1).bfloat16()
    optimizer = trained(model, num_steps=2)
    path = save(tmp_path, 2, model=model, optimizer=optimizer, counters={}).path
    wide = model_of(2)
    theirs = trained(wide, num_steps=0)
    load(path, model=wide, optimizer=theirs)
    for ours, other in zip(model.parameters(), wide.parameters(), strict=True):
        assert torch.equal(other, ours.float())
        moment = theirs.state[other]["exp_avg"]
        assert moment.dtype == torch.float32
        assert torch.equal(moment, optimizer.state[ours]["exp_avg"].float())


@pytest.mark.parametrize(
    ("fresh", "kind", "options", "named"),
    [
        (
            model_of(2, hidden=7),
            torch.optim.AdamW,
            {},
            "model.0.weight is (11, 6) in it and (11",
        ),
        (model_of(2)[:2], torch.optim.AdamW, {}, "model.2.bias"),
        (model_of(2).append(nn.Linear(1, 1)), torch.optim.AdamW, {}, "model.3.bias"),
        (model_of(2), torch.optim.SGD, {"momentum": 0.9}, "optimizer.0.weight.momentum_buffer"),
        (model_of(2), torch.optim.SGD, {}, "optimizer.0.weight.exp_avg"),
        (model_of(2), torch.optim.AdamW, {"amsgrad": True}, "optimizer.0.weight.max_exp_avg_sq"),
    ],
)
def test_what_does_not_fit_is_named_and_refused(
    tmp_path: Path,
    fresh: nn.Sequential,
    kind: type[torch.optim.Optimizer],
    options: dict[str, object],
    named: str,
) -> None:
    path = save_plain(tmp_path, 2, model_of(1)).path
    before = [value.clone() for value in fresh.parameters()]
    with pytest.raises(ConfigError) as caught:
        load(path, model=fresh, optimizer=trained(fresh, num_steps=0, kind=kind, **options))
    assert named in str(caught.value)
    assert all(map(torch.equal, before, fresh.parameters()))


def test_numbers_of_another_kind_are_refused(tmp_path: Path) -> None:
    model, fresh = nn.Module(), nn.Module()
    model.register_buffer("count", torch.ones(2))
    fresh.register_buffer("count", torch.zeros(2, dtype=torch.int64))
    path = save(tmp_path, 1, model=model, optimizer=None, counters={}).path
    with pytest.raises(ConfigError, match=r"model\.count is torch\.float32 in it and torch\.int64"):
        load(path, model=fresh, optimizer=None)


def test_keys_may_be_allowed_by_name(tmp_path: Path) -> None:
    model = model_of(1)
    optimizer = trained(model, num_steps=2)
    path = save(tmp_path, 2, model=model, optimizer=optimizer, counters={}).path
    fresh = model_of(2)
    theirs = trained(fresh, num_steps=0, amsgrad=True)
    load(path, model=fresh, optimizer=theirs, allow=["optimizer.*.max_exp_avg_sq"])
    state = whole_state(fresh, theirs)
    added = {key for key in state if key.endswith("max_exp_avg_sq")}
    assert not any(state.pop(key).any() for key in added)
    _assert_equal(state, whole_state(model, optimizer))


def test_a_part_without_saved_state_starts_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = model_of(1)
    model[0].requires_grad_(False)
    optimizer = trained(model, num_steps=2)
    path = save(tmp_path, 2, model=model, optimizer=optimizer, counters={}).path
    fresh = model_of(2)
    theirs = trained(fresh, num_steps=0)
    load(path, model=fresh, optimizer=theirs)
    assert not theirs.state.get(fresh.get_parameter("0.weight"))
    assert theirs.state[fresh.get_parameter("1.weight")]["step"] == 2
    assert "0.weight" in caplog.text


def test_weights_alone_can_be_loaded_but_not_conjured_moments(tmp_path: Path) -> None:
    model = model_of(1)
    path = save(tmp_path, 1, model=model, optimizer=None, counters={}).path
    fresh = model_of(2)
    with pytest.raises(ConfigError, match="no optimizer state"):
        load(path, model=fresh, optimizer=trained(fresh, num_steps=0))
    full = save_plain(tmp_path, 2, model)
    load(full.path, model=fresh, optimizer=None)
    assert torch.equal(fresh.get_parameter("0.weight"), model.get_parameter("0.weight"))


def test_state_of_a_strange_form_is_refused_by_name(tmp_path: Path) -> None:
    model = model_of(1)
    optimizer = trained(model, num_steps=1)
    state = optimizer.state[model.get_parameter("1.weight")]
    state["column"] = torch.zeros(6)
    with pytest.raises(WorkError, match=r"optimizer\.1\.weight\.column has 6 rows"):
        save(tmp_path, 1, model=model, optimizer=optimizer, counters={})
    state["column"] = 3
    with pytest.raises(WorkError, match=r"optimizer\.1\.weight\.column is a int"):
        save(tmp_path, 1, model=model, optimizer=optimizer, counters={})


def test_attachments_travel_under_the_manifest(tmp_path: Path) -> None:
    source = tmp_path / "tokenizer.json"
    source.write_text("{}")
    attachments: dict[str, Path | bytes] = {"hf/tokenizer.json": source, "config.yaml": b"run: {}"}
    model = model_of(1)
    folder = tmp_path / "checkpoints"
    saved = save(folder, 1, model=model, optimizer=None, counters={}, attachments=attachments)
    path = local(saved.path)
    assert (path / "attachments/hf/tokenizer.json").read_text() == "{}"
    assert "attachments/config.yaml" in Manifest.read(path).files
    (path / "attachments/config.yaml").write_bytes(b"run: []")
    assert [damage.file.name for damage in verify(path)] == ["config.yaml"]
    for name in ("../out", "/out"):
        with pytest.raises(WorkError, match="out is no name"):
            save(folder, 2, model=model, optimizer=None, counters={}, attachments={name: b""})
    assert [step.number for step in steps(folder)] == [1]


def test_a_complete_step_is_never_written_again(tmp_path: Path) -> None:
    path = local(save_plain(tmp_path, 1, model_of(1)).path)
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    with pytest.raises(WorkError, match=f"{path} is a complete checkpoint"):
        save_plain(tmp_path, 1, model_of(2))
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before


def test_a_damaged_step_is_moved_aside_and_written_again(tmp_path: Path) -> None:
    path = local(save_plain(tmp_path, 1, model_of(1)).path)
    (path / "manifest.json").unlink()
    (path / "stray").write_text("from the first try")
    save_plain(tmp_path, 1, model_of(2))
    assert verify(path) == ()
    files = {".metadata", "__0_0.distcp", "index.json", "manifest.json"}
    assert {file.name for file in path.iterdir()} == files
    assert len(list(tmp_path.glob(".step-00000001.bad-*/stray"))) == 1


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=256k", "tmpfs") as disk:
        yield disk


def test_a_disk_that_fills_while_saving_costs_only_that_step(tiny_disk: Path) -> None:
    save_plain(tiny_disk, 1, model_of(1))
    # The tensors just find room, and what describes them does not.
    many = nn.ParameterList([torch.zeros(1) for _ in range(125)])
    with pytest.raises(WorkError, match=r"index\.json could not be written: No space left"):
        save(tiny_disk, 2, model=many, optimizer=None, counters={})
    assert [path.name for path in tiny_disk.iterdir()] == ["step-00000001"]
    fresh = model_of(2)
    load(tiny_disk / "step-00000001", model=fresh, optimizer=trained(fresh, num_steps=0))
    assert prune(tiny_disk, 1) == ()
    save_plain(tiny_disk, 3, fresh)
    assert [step.number for step in steps(tiny_disk)] == [1, 3]


def test_a_disk_without_room_is_refused_before_anything_is_written(tiny_disk: Path) -> None:
    big = nn.Linear(300, 300)
    with pytest.raises(WorkError, match="has no room for step 2"):
        save(tiny_disk, 2, model=big, optimizer=None, counters={})
    assert list(tiny_disk.iterdir()) == []


def test_ranks_of_one_host_share_its_cores_when_they_read(tmp_path: Path) -> None:
    alone = medium_of(tmp_path).num_readers()
    assert 1 <= alone <= len(os.sched_getaffinity(0))
    assert medium_of(tmp_path).num_readers(alone) == 1
    assert medium_of(tmp_path).num_readers(10 * alone) == 1, "none is left without"


def test_a_block_of_more_tensors_than_one_call_of_the_system_fills(tmp_path: Path) -> None:
    def model(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.ParameterList(nn.Parameter(torch.randn(1 + i % 3)) for i in range(1500))

    path = save(tmp_path, 1, model=(saved := model(1)), optimizer=None, counters={}).path
    loaded = model(2)
    load(path, model=loaded, optimizer=None)
    _assert_equal(loaded.state_dict(), saved.state_dict())


def test_two_may_take_the_same_rows_and_each_in_its_own_format(tmp_path: Path) -> None:
    model = model_of(1)
    path = save(tmp_path, 1, model=model, optimizer=None, counters={}).path
    reader = CheckpointReader(path)
    entries = [reader.entry("model.2.bias") for _ in range(2)]
    narrow = replace(entries[0], local=entries[0].local.bfloat16())
    for wanted in (entries, [entries[0], narrow], [narrow]):
        for entry in wanted:
            entry.local.fill_(torch.nan)
        reader.fill(wanted)
        for entry in wanted:
            expected = model.get_parameter("2.bias").to(entry.local.dtype)
            assert torch.equal(entry.local, expected)
