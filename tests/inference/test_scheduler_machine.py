"""Random histories of a scheduler on tight pools, checked after every event, and replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from shoal.errors import ConfigError, Overloaded
from shoal.inference import FinishReason, Limits, State
from tests.inference.world import VOCAB, World, request

# Few tokens and few lengths, so that prompts share beginnings and answers run into each other.
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=9)
RECENCY = st.integers(-2, 5)
"""Which request: 0 is the last that came, 1 the one before, -1 the one that comes next."""


class Histories(RuleBasedStateMachine):
    """Arrivals, aborts, steps and failures in any order."""

    world: World

    @initialize(
        num_blocks=st.integers(3, 9),
        block_size=st.integers(1, 3),
        max_running=st.integers(1, 4),
        spare_tokens=st.integers(0, 6),
        priority_arrivals=st.integers(1, 3),
        prefix_cache=st.sampled_from([True, True, False]),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        max_running: int,
        spare_tokens: int,
        priority_arrivals: int,
        prefix_cache: bool,
    ) -> None:
        self.limits = Limits(
            vocab_size=VOCAB,
            context_length=16,
            num_blocks=num_blocks,
            block_size=block_size,
            max_running=max_running,
            max_step_tokens=max_running + spare_tokens,
            max_waiting=6,
            priority_arrivals=priority_arrivals,
            prefix_cache=prefix_cache,
            max_remembered_aborts=3,
        )
        self.world = World(limits=self.limits)
        self.events: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.number = 0

    def do(self, deed: str, *arguments: Any, **options: Any) -> None:
        """Do it, and note it for the replay."""
        self.events.append((deed, arguments, options))
        _deeds(self.world)[deed](*arguments, **options)

    def name(self, recency: int) -> str:
        """Id of a request that came, or that will come."""
        return f"request {max(0, self.number - 1 - recency)}"

    @rule(
        prompt=PROMPTS,
        n=st.integers(1, 3),
        max_tokens=st.one_of(st.none(), st.integers(0, 6)),
        min_tokens=st.integers(0, 3),
        priority=st.integers(-2, 2),
        ignore_eos=st.booleans(),
        prompt_logprobs=st.sampled_from([None, None, 0, 2]),
    )
    def arrive(self, prompt: list[int], **params: Any) -> None:
        if params["max_tokens"] is not None:
            params["min_tokens"] = min(params["min_tokens"], params["max_tokens"])
        self.do("add", request(self.name(-1), *prompt, **params))
        self.number += 1

    @rule(recency=RECENCY)
    def abort(self, recency: int) -> None:
        self.do("abort", self.name(recency))

    @rule(recency=st.one_of(st.none(), RECENCY), broken_row=st.sampled_from([False] * 9 + [True]))
    def step(self, recency: int | None, broken_row: bool) -> None:
        name = None if recency is None else self.name(recency)
        self.do("step", abort_meanwhile=name, broken_row=broken_row)

    @rule(count=st.integers(2, 5))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.do("step")

    @rule(which=st.integers(0, 3))
    def meet_a_stop_string(self, which: int) -> None:
        self.do("stop", which)

    @rule()
    def fail(self) -> None:
        self.do("fail")

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        self.do("drain")
        for name, sequences in self.world.live.items():
            wanted = sequences[0].request.params.prompt_logprobs
            if wanted is not None and sequences[0].finish_reason is FinishReason.LENGTH:
                assert self.world.scored[name] == list(range(sequences[0].num_prompt - 1))
        again = World(limits=self.limits)
        for deed, arguments, options in self.events:
            _deeds(again)[deed](*arguments, **options)
        assert again.trace == self.world.trace


def _deeds(world: World) -> dict[str, Callable[..., Any]]:
    return {
        "add": lambda new: _add(world, new),
        "abort": world.abort,
        "step": world.step,
        "stop": lambda which: _stop(world, which),
        "fail": world.fail,
        "drain": world.drain,
    }


def _add(world: World, new: Any) -> None:
    refused = world.scheduler.stats().refused
    try:
        world.add(new)
    except (ConfigError, Overloaded):
        assert world.scheduler.stats().refused == refused + 1
        world.check()


def _stop(world: World, which: int) -> None:
    """End one of the sequences that decode, as the engine does."""
    decoding = [
        each
        for sequences in world.live.values()
        for each in sequences
        if each.state is State.DECODING
    ]
    if decoding:
        world.scheduler.finish(decoding[which % len(decoding)])
        world.check()


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=150, stateful_step_count=40)
