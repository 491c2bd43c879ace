"""Who computes what: bursts over several engines, engines that are lost, and books that balance."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from shoal.errors import ConfigError, Overloaded
from shoal.inference import Output
from shoal_deployments.engine_client import EngineFailed, EngineUnavailable
from shoal_deployments.engines import Engines
from shoal_deployments.mailbox import Mailbox
from tests.actors.scripted_actor import settle, until
from tests.deployments.scripted_actors import Actor, asked, connected, play


def output(name: str, token: int, *, choice: int = 0, ends: bool = False) -> Output:
    return Output(
        request_id=name,
        choice=choice,
        token_ids=(token,),
        finish_reason="length" if ends else None,
    )


def failed(name: str, *, choice: int = 0) -> Output:
    return Output(
        request_id=name, choice=choice, finish_reason="error", error="MemoryError: scripted"
    )


@pytest.mark.parametrize("num_frontends", [1, 4])
@pytest.mark.parametrize("kind", ["different", "alike", "one long beginning"])
def test_a_burst_is_spread_over_the_engines(num_frontends: int, kind: str) -> None:
    """Each frontend knows of the others' requests by pulses only, and none comes meanwhile."""
    tails = {"different": 0, "alike": 40, "one long beginning": 30}[kind]

    async def scene() -> list[int]:
        actors = [Actor() for _ in range(4)]
        frontends = [await connected(actors) for _ in range(num_frontends)]
        for number in range(64):
            prompt = [7] * tails + [number % 250] * (41 - tails)
            request = asked(str(number), [7] * 41 if kind == "alike" else prompt)
            await frontends[number % num_frontends].submit([request], Mailbox(1000))
        return [len(actor.taken) for actor in actors]

    counts = asyncio.run(scene())
    assert sum(counts) == 64 and max(counts) <= 2 * 64 / 4, counts


@pytest.mark.parametrize("num_tokens", [3, 41])
def test_frontends_agree_where_a_prompt_goes_but_not_all_prompts_to_one(num_tokens: int) -> None:
    """Each frontend has one request, and knows of no other."""

    async def scene(prompts: Sequence[Sequence[int]]) -> list[int]:
        actors = [Actor() for _ in range(4)]
        for number, prompt in enumerate(prompts):
            frontend = await connected(actors)
            await frontend.submit([asked(str(number), prompt)], Mailbox(1000))
        return sorted(len(actor.taken) for actor in actors)

    alike = asyncio.run(scene([[7] * num_tokens] * 16))
    assert alike == [0, 0, 0, 16]
    different = asyncio.run(scene([[token] * num_tokens for token in range(16)]))
    assert different[0] >= 1 and different[-1] <= 8, different


def test_what_a_lost_engine_computed_goes_on_elsewhere() -> None:
    async def scene(engines: Engines, actors: list[Actor]) -> None:
        mailbox = Mailbox(1000)
        await engines.submit([asked("r", n=2)], mailbox)
        engines.on_outputs(0, [output("r", 5), output("r", 6, choice=1)])
        engines.on_outputs(0, [output("r", 7)])
        await mailbox.take()
        await actors[0].lose()
        await settle()
        engines.on_outputs(0, [output("r", 99)])  # what was still on its way says nothing
        # The place 1 has other kernels: the same bits come from 2 only.
        assert [len(actor.taken) for actor in actors] == [1, 0, 1]
        assert actors[2].taken[0].request == actors[0].taken[0].request
        engines.on_outputs(2, [output("r", 5), output("r", 6, choice=1)])
        engines.on_outputs(2, [output("r", 7), output("r", 8, choice=1, ends=True)])
        engines.on_outputs(2, [output("r", 9, ends=True)])
        got = [(each.choice, each.token_ids[0]) for each in await mailbox.take()]
        assert got == [(1, 8), (0, 9)]
        assert engines._held.by_id == {}
        migrated = {each.replica: each.migrated for each in await engines.stats()}
        assert migrated == {"1": 0, "2": 0}  # the one that is lost says nothing
        actors[0] = Actor()  # another was started in its place
        await until(lambda: bool(actors[0].streams))
        await settle()
        migrated = {each.replica: each.migrated for each in await engines.stats()}
        assert migrated == {"0": 1, "1": 0, "2": 0}

    play(scene, "one", "two", "one")


def test_a_request_moves_once() -> None:
    async def scene(engines: Engines, actors: list[Actor]) -> None:
        mailbox = Mailbox(1000)
        await engines.submit([asked("r")], mailbox)
        await actors[0].lose()
        await settle()
        await actors[1].lose()
        await settle()
        assert [len(actor.taken) for actor in actors] == [1, 1, 0]
        with pytest.raises(EngineFailed, match="was lost"):
            await mailbox.take()
        assert engines._held.by_id == {}

    play(scene, "one", "one", "one")


@pytest.mark.parametrize("why", ["no other", "other kernels", "full"])
def test_what_nobody_can_go_on_with_fails_at_once(why: str) -> None:
    async def scene(engines: Engines, actors: list[Actor]) -> None:
        mailbox = Mailbox(1000)
        await engines.submit([asked("r")], mailbox)
        engines.on_outputs(0, [output("r", 5)])
        if why == "full":
            actors[1].refusal = Overloaded("Full.")
        await actors[0].lose()
        await settle()
        assert [each.token_ids for each in await mailbox.take()] == [(5,)]
        with pytest.raises(EngineFailed, match="was lost"):
            await mailbox.take()
        assert engines._held.by_id == {}

    others = {"no other": (), "other kernels": ("two",), "full": ("one",)}[why]
    play(scene, "one", *others)


@pytest.mark.parametrize("had", [1, 3], ids=["a later token", "an earlier token"])
def test_an_error_at_the_second_engine_is_told_whatever_came_before(had: int) -> None:
    """It comes in the place of a token that the client has, or has not."""

    async def scene(engines: Engines, actors: list[Actor]) -> None:
        mailbox = Mailbox(1000)
        await engines.submit([asked("r", n=2)], mailbox)
        for token in range(had):
            engines.on_outputs(0, [output("r", token)])
        engines.on_outputs(0, [output("r", 7, choice=1, ends=True)])
        await mailbox.take()
        await actors[0].lose()
        await settle()
        engines.on_outputs(1, [output("r", 0), failed("r", choice=1)])  # one that has ended
        assert engines._held.by_id.keys() == {"r"}
        engines.on_outputs(1, [failed("r")])
        assert engines._held.by_id == {}
        assert await mailbox.take() == [failed("r")]

    play(scene, "one", "one")


def test_an_end_before_what_the_client_has_is_an_error() -> None:
    """As of an engine that had less memory, where no ``max_tokens`` was set."""

    async def scene(engines: Engines, actors: list[Actor]) -> None:
        mailbox = Mailbox(1000)
        await engines.submit([asked("r")], mailbox)
        engines.on_outputs(0, [output("r", 5), output("r", 6), output("r", 7)])
        await mailbox.take()
        await actors[0].lose()
        await settle()
        engines.on_outputs(1, [output("r", 5), output("r", 6, ends=True)])
        assert engines._held.by_id == {}
        [last] = await mailbox.take()
        assert (last.finish_reason, last.token_ids) == ("error", ())
        assert last.error is not None and "ended it before" in last.error

    play(scene, "one", "one")


def test_nothing_is_held_of_what_is_over() -> None:
    async def scene(engines: Engines, actors: list[Actor]) -> None:
        mailbox = Mailbox(1000)
        await engines.submit([asked("done", n=2), asked("left")], mailbox)
        engines.on_outputs(0, [output("done", 1, ends=True)])
        assert engines._held.by_id.keys() == {"done", "left"}
        engines.on_outputs(0, [output("done", 1, choice=1, ends=True)])
        engines.abort(["left", "done", "never seen"])
        engines.abort(["left"])
        await settle()
        assert actors[0].aborted == ["left"]  # once, and nothing that is over
        engines.on_outputs(0, [output("left", 1)])
        refusals = (ConfigError("prompt", "", "wrong", "mend"), Overloaded("Full."))
        for refusal, raised in zip(refusals, (ConfigError, Overloaded), strict=True):
            actors[0].refusal = refusal
            with pytest.raises(raised):
                await engines.submit([asked("refused"), asked("too")], mailbox)
        await actors[0].lose()
        with pytest.raises(EngineUnavailable):
            await engines.submit([asked("late")], mailbox)
        assert engines._held.by_id == {}

    play(scene, "one")
