"""Steps in an S3-compatible store: published by their manifest, read by ranges, pruned, cleaned."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from shoal.checkpoint import (
    Location,
    OnFailure,
    RunFolder,
    clean,
    is_pinned,
    load,
    newest,
    pin,
    prune,
    save,
    steps,
    verify,
)
from shoal.cli.steps import step_of, steps_of
from shoal.errors import ConfigError, Unavailable, WorkError
from shoal.storage import StorePath, lease, location_of, prune_or_warn, told
from shoal.storage.owner import LOCK_NAME
from tests.checkpoint.bucket import Bucket, Harm, serving
from tests.checkpoint.plain import local, model_of, save_plain, trained
from tests.checkpoint.saving import files_of, told_to_end, training, wait_until

DEADLINE_S = 20.0
FILES = {".metadata", "__0_0.distcp", "index.json", "manifest.json"}


@pytest.fixture(scope="module")
def server() -> Iterator[Bucket]:
    """One server for all tests."""
    with serving() as bucket:
        yield bucket


@pytest.fixture
def bucket(server: Bucket) -> Iterator[Bucket]:
    """It, empty and well."""
    server.empty()
    yield server
    server.rule = lambda method, path: None


def _numbers(folder: Location) -> list[int]:
    return [step.number for step in steps(folder)]


def _assert_loads(path: Location, seed: int = 1) -> None:
    model, expected = model_of(9), model_of(seed)
    load(path, model=model, optimizer=trained(model, num_steps=0))
    trained(expected, num_steps=seed)
    assert torch.equal(model.get_parameter("2.bias"), expected.get_parameter("2.bias"))


def test_a_step_has_the_bytes_that_it_has_on_a_disk(bucket: Bucket, tmp_path: Path) -> None:
    place = bucket.at("runs/one")
    with training(place, keep=2) as trainer:
        for step in (1, 2, 3):
            trainer.step()
            trainer.save(step)
        trainer.saver.drain()
        model, optimizer = trainer.model, trainer.optimizer
        disk = save(
            tmp_path,
            3,
            model=model,
            optimizer=optimizer,
            counters={"step": 3},
            rng={"cpu": torch.get_rng_state()},
        ).path
    assert _numbers(place) == [2, 3]
    last = newest(place)
    assert last is not None and verify(last.path) == ()
    names = {key for key in bucket.keys("runs/one") if last.path.name in key}
    assert names == {f"{last.path.name}/{name}" for name in FILES}
    assert len(bucket.keys("runs/one")) == 2 * len(FILES)
    for name, data in files_of(local(disk)).items():
        assert bucket.read(f"runs/one/{last.path.name}/{name}") == data
    fresh = model_of(4)
    load(last.path, model=fresh, optimizer=trained(fresh, num_steps=0))
    assert all(map(torch.equal, fresh.parameters(), model.parameters()))


def test_large_parts_are_written_and_read_by_ranges(bucket: Bucket) -> None:
    model = torch.nn.Embedding(1000, 3000)
    path = save(bucket.at("run"), 1, model=model, optimizer=None, counters={}).path
    seen, bucket.seen = bucket.seen, 0
    fresh = torch.nn.Embedding(1000, 3000)
    load(path, model=fresh, optimizer=None)
    assert torch.equal(model.weight, fresh.weight) and seen
    key = f"run/{path.name}/__0_0.distcp"
    data = bytearray(bucket.read(key))
    data[5 * 2**20] ^= 1
    bucket.write(key, bytes(data))
    assert "checksum in bytes 4194304 to 8388608" in str(verify(path)[0])


def _flip(data: bytes) -> bytes:
    return data[:-30] + bytes([data[-30] ^ 1]) + data[-29:]


def _is_refused(path: Location, name: str, *, is_read: bool) -> None:
    assert [damage.file for damage in verify(path)] == [path / name]
    model = model_of(9)
    before = [value.clone() for value in model.parameters()]
    with pytest.raises(WorkError, match=re.escape(name)):
        load(path, model=model, optimizer=trained(model, num_steps=0))
    for old, new in zip(before, model.parameters(), strict=True):
        assert new.isnan().all() if is_read else torch.equal(old, new)


@pytest.mark.parametrize("harm", [_flip, lambda data: data[: len(data) // 2], None])
def test_damage_is_found_and_the_step_before_loads(
    bucket: Bucket, harm: Callable[[bytes], bytes] | None
) -> None:
    place = bucket.at("run")
    save_plain(place, 1, model_of(1))
    path = save_plain(place, 2, model_of(2)).path
    for name in sorted(FILES):
        key = f"run/{path.name}/{name}"
        data = bucket.read(key)
        if harm is None:
            bucket.delete(key)
        else:
            bucket.write(key, harm(data))
        _is_refused(path, name, is_read=harm is _flip and name == "__0_0.distcp")
        if harm is not _flip or name == "manifest.json":
            assert _numbers(place) == [1]
        _assert_loads(steps(place)[0].path)
        bucket.write(key, data)
    assert verify(path) == ()


def _train_until_killed(place: Location, connection: Connection) -> None:
    with training(place) as trainer:
        trainer.save(1)
        trainer.saver.drain()
        connection.send("saved")
        connection.recv()
        trainer.save(2)
        signal.pause()


def test_what_a_killed_save_left_is_no_step_and_goes(bucket: Bucket) -> None:
    place, other = bucket.at("one"), bucket.at("other")
    save_plain(other, 7, model_of(7))
    bucket.write("other/step-00000009-0123abcd/.save/begun", b"")  # another run's, under way
    bucket.write("one/notes/step-00000002-0123abcd/file", b"")
    bucket.write("one/step-best/file", b"")

    def hold(method: str, path: str) -> Harm:
        return "hold" if method == "PUT" and path.endswith("index.json") else None

    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_train_until_killed, args=(place, theirs))
    process.start()
    theirs.close()
    assert ours.recv() == "saved"
    bucket.rule = hold
    ours.send("go on")
    wait_until(lambda: bucket.held == 1)
    process.kill()
    process.join()
    process.close()
    ours.close()
    bucket.rule = lambda method, path: None
    before = bucket.keys()
    left = {key for key in before if key.startswith("one/step-00000002")}
    assert {key.rpartition("/")[2] for key in left} >= {"__0_0.distcp", "begun"}
    assert _numbers(place) == [1]
    clean(place)
    assert before - bucket.keys() == left
    save_plain(place, 2, model_of(2))
    assert _numbers(place) == [1, 2]
    _assert_loads(steps(place)[1].path, seed=2)


def test_retention_spares_pins_damage_and_strangers(bucket: Bucket) -> None:
    place = bucket.at("run")
    paths = {step: save_plain(place, step, model_of(step)).path for step in (1, 2, 3, 4)}
    bucket.delete(f"run/{paths[3].name}/__0_0.distcp")
    bucket.write("run/step-best/file", b"")
    pin(paths[1])
    assert is_pinned(paths[1]) and not is_pinned(paths[2])
    assert [step.number for step in prune(place, 1)] == [2]
    assert _numbers(place) == [1, 4]
    assert {key.partition("/")[0] for key in bucket.keys("run")} == {
        *(paths[step].name for step in (1, 3, 4)),
        "step-best",
    }


def test_a_complete_step_is_not_written_again_and_a_damaged_one_is(bucket: Bucket) -> None:
    place = bucket.at("run")
    path = save_plain(place, 1, model_of(1)).path
    with pytest.raises(WorkError, match="is a complete checkpoint already"):
        save_plain(place, 1, model_of(2))
    bucket.delete(f"run/{path.name}/index.json")
    save_plain(place, 1, model_of(2))
    assert _numbers(place) == [1]


def test_a_step_that_the_store_does_not_give_is_not_passed_over(bucket: Bucket) -> None:
    place = bucket.at("run")
    for step in (1, 2, 3):
        path = save_plain(place, step, model_of(step)).path
    before = bucket.keys()
    model = model_of(9)

    def refuse(name: str) -> None:
        bucket.rule = lambda method, key: "403" if method == "GET" and key.endswith(name) else None

    refuse(f"{path.name}/manifest.json")
    for deed in (
        lambda: newest(place),
        lambda: prune(place, 1),
        lambda: verify(path),
        lambda: load(path, model=model, optimizer=None),
    ):
        with pytest.raises(Unavailable, match=r"manifest\.json.* cannot be read: .*ACCESS_DENIED"):
            deed()
    refuse("__0_0.distcp")
    for deed in (lambda: verify(path), lambda: load(path, model=model, optimizer=None)):
        with pytest.raises(Unavailable, match=r"__0_0\.distcp.* cannot be read: "):
            deed()
    refuse("")
    with pytest.raises(Unavailable, match="cannot be looked at: .*ACCESS_DENIED"):
        newest(place)
    with pytest.raises(Unavailable, match="cannot be looked at: .*ACCESS_DENIED"):
        clean(place)
    bucket.rule = lambda method, path: None
    assert bucket.keys() == before and _numbers(place) == [1, 2, 3]


def test_leftovers_that_stay_are_in_nobody_s_way(bucket: Bucket) -> None:
    place = bucket.at("run")
    save_plain(place, 1, model_of(1))
    bucket.write("run/step-00000002-0123abcd/.save/begun", b"")
    bucket.rule = lambda method, path: "403" if method in ("DELETE", "POST") else None
    assert clean(place) == ()
    save_plain(place, 2, model_of(2))
    prune_or_warn(place, 1)
    bucket.rule = lambda method, path: None
    assert _numbers(place) == [1, 2]
    assert [path.name for path in clean(place)] == ["step-00000002-0123abcd"]


@pytest.mark.parametrize(("harm", "name"), [("500", "__0_0.distcp"), ("403", "manifest.json")])
def test_a_store_that_refuses_costs_the_steps_that_it_refuses(
    bucket: Bucket, harm: Harm, name: str
) -> None:
    place = bucket.at("run")
    with training(place, on_failure=OnFailure.WARN) as trainer:
        trainer.save(1)
        wait_until(lambda: trainer.saver.num_under_way(poll=True) == 0)
        bucket.rule = lambda method, path: harm if method == "PUT" and path.endswith(name) else None
        trainer.step()
        trainer.save(2)
        wait_until(lambda: trainer.saver.num_under_way(poll=True) == 0, 60)
        _assert_loads(steps(place)[0].path)
        bucket.rule = lambda method, path: None
        trainer.save(3)
        trainer.saver.drain()
    assert _numbers(place) == [1, 3]
    (failed,) = [error for step, error, _ in trainer.errors() if step == 2]
    assert failed is not None and name in failed and "could not be written" in failed
    assert not [key for key in bucket.keys("run") if "step-00000002" in key]


def test_a_slow_store_does_not_hold_the_steps_up(bucket: Bucket) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def delay(method: str, path: str) -> Harm:
        if method == "PUT" and path.endswith("manifest.json"):
            begun.set()
            may_end.wait(DEADLINE_S)
        return None

    with training(bucket.at("run")) as trainer:
        bucket.rule = delay
        trainer.save(1)
        trainer.step()
        assert begun.wait(DEADLINE_S)
        for _ in range(3):
            trainer.step()
        assert _numbers(bucket.at("run")) == []
        may_end.set()
        trainer.saver.drain()
    assert _numbers(bucket.at("run")) == [1]


def test_a_store_that_is_gone_ends_the_run_by_the_next_save() -> None:
    with serving() as other:
        place = other.at("run")
        with pytest.raises(WorkError, match="Step 2 was not saved"), training(place) as trainer:
            trainer.save(1)
            trainer.saver.drain()
            other.rule = lambda method, path: "500"
            trainer.save(2)
            trainer.step()
            trainer.saver.drain()
        other.rule = lambda method, path: None
        _assert_loads(steps(place)[0].path)
        assert _numbers(place) == [1]


def test_a_second_run_is_kept_out_of_a_folder(bucket: Bucket, tmp_path: Path) -> None:
    first, second = (RunFolder(tmp_path / way / "demo", bucket.uri("runs")) for way in "ab")
    with first.lock():
        with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}") as caught:
            with second.lock():
                pass
        assert caught.value.field == "run.name"
        with RunFolder(tmp_path / "other", bucket.uri("runs")).lock():
            assert bucket.keys("runs") == {f"demo/{LOCK_NAME}", f"other/{LOCK_NAME}"}
    assert bucket.keys("runs") == set()
    lock = {"host": "elsewhere", "pid": 7, "started": "2026-01-01T00:00:00"}
    key, record = f"runs/demo/{LOCK_NAME}", json.dumps(lock).encode()
    with _signs(lambda number: bucket.write(key, record + b"\n%d" % number)):
        with pytest.raises(ConfigError, match="process 7 on elsewhere"), second.lock():
            pass
    gone = {**lock, "host": os.uname().nodename, "pid": 2**22 - 1}
    bucket.write(key, json.dumps(gone).encode())
    with pytest.raises(WorkError, match=r"demo\?.* was taken over by process 7 on else"):
        with second.lock(), told_to_end():
            bucket.write(key, record + b"\n3")
    assert bucket.read(key) == record + b"\n3", "it is the other's now"


@contextmanager
def _signs(give: Callable[[int], None]) -> Iterator[None]:
    """Signs of life of somebody else, one after another."""
    ended = threading.Event()

    def run() -> None:
        for number in count(1):
            give(number)
            if ended.wait(0.5):
                return

    give(0)
    other = threading.Thread(target=run)
    other.start()
    try:
        yield
    finally:
        ended.set()
        other.join()


@pytest.mark.parametrize("refused", ["PUT", "GET", "DELETE"])
def test_what_a_run_may_not_do_there_is_refused_before_it_starts(
    bucket: Bucket, tmp_path: Path, refused: str
) -> None:
    bucket.rule = lambda method, path: "403" if method == refused else None
    with pytest.raises(ConfigError, match="ACCESS_DENIED") as caught:
        with RunFolder(tmp_path / "demo", bucket.uri("runs")).lock():
            pass
    assert caught.value.field == "checkpoint.storage"


def test_a_bucket_that_is_not_there_is_refused(bucket: Bucket, tmp_path: Path) -> None:
    uri = f"s3://nowhere/runs?{bucket.options}"
    with pytest.raises(ConfigError, match="NO_SUCH_BUCKET") as caught:
        with RunFolder(tmp_path / "demo", uri).lock():
            pass
    assert (caught.value.field, caught.value.value) == ("checkpoint.storage", uri)


def test_a_folder_of_another_file_system_is_a_storage_too(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", f"file://{tmp_path}/shelf%20of%20runs")
    with folder.lock():
        save_plain(folder.checkpoints, 1, model_of(1))
    assert (tmp_path / "shelf of runs" / "run" / "step-00000001").is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"checkpoint\.storage.*Not a directory"):
        with RunFolder(tmp_path / "run", f"file://{tmp_path}/file").lock():
            pass


def test_other_stores_are_reached_by_fsspec() -> None:
    place = location_of("fsspec+memory://shelf/run")
    for step in (1, 2):
        save_plain(place, step, model_of(step))
    assert _numbers(place) == [1, 2]
    assert [step.number for step in prune(place, 1)] == [1]
    assert verify(steps(place)[0].path) == ()
    _assert_loads(steps(place)[0].path, seed=2)
    assert isinstance(place, StorePath)
    with lease(place), pytest.raises(ConfigError, match="in use by process"), lease(place):
        pass
    assert _numbers(place) == [2]


def test_a_run_may_be_called_like_a_step() -> None:
    run = "fsspec+memory://shelf/step-by-step"
    path = save_plain(location_of(run), 1, model_of(1)).path
    assert step_of(run, "STEP") == path == step_of(str(path), "STEP")
    assert steps_of(run, "PATH") == [path] == steps_of(str(path), "PATH")


@pytest.mark.parametrize(
    ("uri", "problem"),
    [
        ("s3://", "names no place"),
        ("s3://key:secret@bucket/runs", "credentials do not belong"),
        ("s3://bucket/runs?regoin=here", "regoin is none of its options"),
        ("ftp://host/runs", "ftp is none of"),
        ("s3://bucket//runs", "empty or one of dots"),
        ("s3://bucket/runs/../other", "empty or one of dots"),
        ("file://host/runs", "names no folder of this machine"),
        ("file:///runs#1", "names no folder of this machine"),
    ],
)
def test_uris_that_name_no_store(uri: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        location_of(uri, "checkpoint.storage")
    assert "secret" not in str(caught.value)


def test_what_a_store_says_goes_into_a_sentence() -> None:
    assert told(OSError("AWS Error ACCESS_DENIED: No response body.")).endswith("response body")
    assert told(OSError(28, "No space left on device")) == "No space left on device"
