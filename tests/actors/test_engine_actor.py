"""The engine's actor, in a process of its own without Ray: what it counts, and how it ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from shoal.config import ServeSettings
from shoal.errors import ConfigError
from shoal.inference import Output, Request, SamplingParams, Submission
from shoal.models import weights_mark
from shoal.ops.on_threads import on_threads
from shoal_actors.engine import EngineActor
from tests.inference.small_models import random_folder
from tests.models.tiny import TINY

DEADLINE_S = 60.0
STALL_S = 5.0


def _submission(frontend: str = "a", name: str = "r") -> Submission:
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    request = Request(id=name, prompt=(1, 2, 3), params=params)
    return Submission(request=request, frontend=frontend, moved_from=3)


def _raise() -> list[Output]:
    raise MemoryError("scripted")


def _hang() -> list[Output]:
    threading.Event().wait()
    return []


def _live(folder: str, mistake: str, parent: Connection) -> None:
    """Serve one stream, and tell ``parent`` what came of it; the actor ends the process."""
    actor = EngineActor(folder, ServeSettings(stall_s=STALL_S))

    async def scene() -> dict[str, Any]:
        after_leaving = await _leave(actor)
        stranger = await actor.submit([_submission("nobody")])
        stream = actor.outputs("a")
        hello = await anext(stream)
        gate = _Gate(actor)
        taken = await actor.submit([_submission()])
        gate.permits.release()
        first = await anext(stream)
        pulse = await actor.pulse()
        _engine(actor).step = {"raises": _raise, "hangs": _hang}[mistake]
        gate.permits.release()
        return {
            "weights": (await actor.facts()).weights,
            "after leaving": after_leaving,
            "stranger": str(stranger),
            "hello": hello,
            "taken": taken,
            "first": first[0].request_id,
            "moved": pulse.moved_from,
            "ends": await _ends(stream),
            "refusal": str(await actor.submit([_submission()])),
        }

    parent.send(asyncio.run(scene()))
    threading.Event().wait()


def _engine(actor: EngineActor) -> Any:
    return actor._loop._engine


class _Gate:
    """Has each step of the engine wait for a permit."""

    def __init__(self, actor: EngineActor) -> None:
        self.permits = threading.Semaphore(0)
        self.arrived = threading.Event()
        self._step = _engine(actor).step
        _engine(actor).step = self._wait

    def _wait(self) -> Any:
        self.arrived.set()
        self.permits.acquire()
        return self._step()


def test_a_folder_without_a_model_is_refused_by_its_key(tmp_path: Path) -> None:
    with on_threads(1), pytest.raises(ConfigError) as refusal:
        EngineActor(str(tmp_path), ServeSettings())
    assert refusal.value.field == "model.path"


async def _leave(actor: EngineActor) -> tuple[int, int, int]:
    """Close a stream whose request is computed: running, cancelled and steps after one step."""
    step, gate = _engine(actor).step, _Gate(actor)
    stream = actor.outputs("leaving")
    await anext(stream)
    await actor.submit([_submission("leaving", "left")])
    assert await asyncio.to_thread(gate.arrived.wait, DEADLINE_S)
    await stream.aclose()  # type: ignore[attr-defined]
    gate.permits.release()
    for _ in range(2000):
        await asyncio.sleep(0.005)
        stats = (await actor.pulse()).stats
        if stats.cancelled:
            break
    _engine(actor).step = step
    return stats.running, stats.cancelled, stats.steps


async def _ends(stream: AsyncIterator[list[Output]]) -> bool:
    async for outputs in stream:
        if any(output.finish_reason for output in outputs):
            return False
    return True


@pytest.mark.parametrize("mistake", ["raises", "hangs"])
def test_an_engine_that_cannot_go_on_ends_its_streams_and_its_process(
    mistake: str, tmp_path: Path
) -> None:
    folder = random_folder(TINY["smollm2"], tmp_path / "m")
    ours, theirs = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=_live, args=(str(folder), mistake, theirs))
    process.start()
    theirs.close()
    try:
        assert ours.poll(DEADLINE_S)
        told = ours.recv()
        process.join(DEADLINE_S)
        assert process.exitcode == 1
    finally:
        process.kill()
        process.join()
    assert told["weights"] == weights_mark(folder)
    assert "not connected" in told["stranger"] and "not connected" in told["refusal"]
    assert (told["hello"], told["taken"], told["first"]) == ([], None, "r")
    assert told["after leaving"] == (0, 1, 1)
    assert told["ends"] and told["moved"] == {3: 2}
