"""When each stage computes what: one forward, one backward, with or without virtual stages.

A digit is a forward of a microbatch, a digit with ``=`` its backward, which takes twice as long::

    2 stages, 4 microbatches               stage 0   01  0=21=32= 3=
                                           stage 1    00=11=22=33=

    ... with two chunks each, the second   stage 0   01ab2 A=3B=c0=d1= C= D=2=3=
    chunk's microbatches in letters        stage 1    01aA=bB=20=31=cC=dD=2=3=

Every stage takes forwards in one order and backwards in another: microbatches go in groups of as
many as there are stages, and of a group the first chunk takes all, then the second, and so on; in
backward the last chunk first. A stage goes forward where it can, as long as fewer forwards than
its limit wait for their backward, else backward. The limit keeps the activations of S - s
microbatches on stage s of S, and of 2 (S - s - 1) + (V - 1) S + 1 chunks where each has V.

The orders come from playing the step through, so they can be run as they are: what happened at
some time cannot wait for what happened later. They never get stuck, as each group could be computed
on its own, chunk after chunk, within the limits.

Sources: PipeDream-Flush (Narayanan et al., https://arxiv.org/abs/2006.09503) and the interleaved
schedule (Narayanan et al., https://arxiv.org/abs/2104.04473); here a last group may be smaller.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice

from shoal.parallel.pipeline.stages import Stages


class Direction(StrEnum):
    """Which way a computation goes through the model."""

    FORWARD = "forward"
    BACKWARD = "backward"


DURATION = {Direction.FORWARD: 1, Direction.BACKWARD: 2}
"""Time of a computation in forwards of one chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Computation:
    """Forward or backward of one microbatch in one chunk."""

    direction: Direction
    microbatch: int
    chunk: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The order of each stage's computations, and how long they take together."""

    stages: Stages
    num_microbatches: int

    orders: tuple[tuple[Computation, ...], ...]
    """By stage."""

    duration: int
    """From the first forward's start to the last backward's end, in forwards of one chunk."""

    @property
    def bubble_share(self) -> float:
        """Share of the step in which a stage waits for the others, if chunks cost the same."""
        work = self.num_microbatches * self.stages.virtual * sum(DURATION.values())
        return 1 - work / self.duration

    def most_in_flight(self, stage: int, weight: Callable[[int], int]) -> int:
        """The most that chunks of a stage weigh together while they wait for their backwards.

        ``weight`` gives that of one microbatch in a chunk.
        """
        now = most = 0
        for computation in self.orders[stage]:
            is_forward = computation.direction is Direction.FORWARD
            now += weight(computation.chunk) * (1 if is_forward else -1)
            most = max(most, now)
        return most


def make_timeline(stages: Stages, num_microbatches: int) -> Timeline:
    """The timeline of one step of ``num_microbatches`` microbatches."""
    play = _Play(stages, num_microbatches)
    duration = play.run()
    return Timeline(
        stages=stages,
        num_microbatches=num_microbatches,
        orders=tuple(tuple(stage.done) for stage in play.stages),
        duration=duration,
    )


def bubble_share(stages: Stages, num_microbatches: int) -> float:
    """``Timeline.bubble_share`` without playing the step through, as far as that can be."""
    num_stages, virtual = stages.num_stages, stages.virtual
    if virtual == 1 or num_microbatches % num_stages == 0:
        return (num_stages - 1) / (virtual * num_microbatches + num_stages - 1)
    # Each further group of as many microbatches as stages takes as long as it computes.
    left_out = max(num_microbatches // num_stages - 2, 0) * num_stages
    played = make_timeline(stages, num_microbatches - left_out)
    work = virtual * sum(DURATION.values())
    return 1 - work * num_microbatches / (played.duration + work * left_out)


def before_backwards(
    stages: Stages, stage: int, num_microbatches: int, weight: Callable[[int], int]
) -> dict[int, int]:
    """For each chunk of a stage the most that waits when one of its backwards begins, itself
    included; weighed as by ``Timeline.most_in_flight``."""
    # Whatever else happens, happens in the first groups of microbatches too.
    left_out = max(num_microbatches // stages.num_stages - 2, 0) * stages.num_stages
    num_microbatches -= left_out
    if stages.virtual > 1 and num_microbatches % stages.num_stages:
        order: Iterable[Computation] = make_timeline(stages, num_microbatches).orders[stage]
    else:
        order = _steady_order(stages, stage, num_microbatches)
    now, most = 0, dict.fromkeys(stages.chunks_of(stage), 0)
    for computation in order:
        chunk = computation.chunk
        if computation.direction is Direction.FORWARD:
            now += weight(chunk)
        else:
            most[chunk] = max(most[chunk], now)
            now -= weight(chunk)
    return most


def _steady_order(stages: Stages, stage: int, num_microbatches: int) -> Iterator[Computation]:
    """As many forwards as the limit allows, then backwards and forwards in turn."""
    forwards = _order(stages, stage, num_microbatches, Direction.FORWARD)
    yield from islice(forwards, in_flight_limit(stages, stage))
    for backward in _order(stages, stage, num_microbatches, Direction.BACKWARD):
        yield backward
        yield from islice(forwards, 1)


def in_flight_limit(stages: Stages, stage: int) -> int:
    """Most forwards of a stage that may wait for their backward."""
    after = stages.num_stages - stage - 1
    if stages.virtual == 1:
        return after + 1
    return 2 * after + (stages.virtual - 1) * stages.num_stages + 1


class _Stage:
    """One stage while the step is played through."""

    def __init__(self, stages: Stages, stage: int, num_microbatches: int) -> None:
        self.limit = in_flight_limit(stages, stage)
        self.done: list[Computation] = []
        self.is_busy = False
        self.forwards = list(_order(stages, stage, num_microbatches, Direction.FORWARD))[::-1]
        self.backwards = list(_order(stages, stage, num_microbatches, Direction.BACKWARD))[::-1]

    @property
    def in_flight(self) -> int:
        """Forwards that wait for their backward."""
        return len(self.backwards) - len(self.forwards)


class _Play:
    """Plays a step through, from the end of one computation to the end of the next."""

    def __init__(self, stages: Stages, num_microbatches: int) -> None:
        self.stages = [
            _Stage(stages, stage, num_microbatches) for stage in range(stages.num_stages)
        ]
        self._stages = stages
        self._over: set[Computation] = set()
        self._ends: list[tuple[int, int, Computation]] = []
        """What is under way: when it ends, and on which stage."""

    def run(self) -> int:
        """Play to the end; when it is reached."""
        now = 0
        self._begin(now, range(len(self.stages)))
        while self._ends:
            now, awake = self._ends[0][0], set()
            while self._ends and self._ends[0][0] == now:
                _, number, computation = heapq.heappop(self._ends)
                self.stages[number].is_busy = False
                self._over.add(computation)
                # Nobody but these two may have waited for it.
                awake |= {number, (number + self._step(computation)) % len(self.stages)}
            self._begin(now, sorted(awake))
        assert not any(stage.backwards for stage in self.stages), "the limits leave a way on"
        return now

    def _begin(self, now: int, numbers: Iterable[int]) -> None:
        """Let idle ones among these stages begin what they can."""
        for number in numbers:
            stage = self.stages[number]
            computation = None if stage.is_busy else self._choose(stage)
            if computation is not None:
                stage.is_busy = True
                stage.done.append(computation)
                end = now + DURATION[computation.direction]
                heapq.heappush(self._ends, (end, number, computation))

    def _step(self, computation: Computation) -> int:
        return 1 if computation.direction is Direction.FORWARD else -1

    def _choose(self, stage: _Stage) -> Computation | None:
        """What an idle stage begins, if it can begin anything."""
        may_go_forward = stage.forwards and stage.in_flight < stage.limit
        if may_go_forward and self._is_ready(stage.forwards[-1]):
            return stage.forwards.pop()
        if stage.backwards and self._is_ready(stage.backwards[-1]):
            return stage.backwards.pop()
        return None

    def _is_ready(self, computation: Computation) -> bool:
        before = _before(self._stages, computation)
        return before is None or before in self._over


def _before(stages: Stages, computation: Computation) -> Computation | None:
    """What a computation needs the result of."""
    direction, chunk = computation.direction, computation.chunk
    if direction is Direction.FORWARD:
        if stages.is_first(chunk):
            return None
        chunk -= 1
    elif stages.is_last(chunk):
        direction = Direction.FORWARD
    else:
        chunk += 1
    return Computation(direction=direction, microbatch=computation.microbatch, chunk=chunk)


def _order(
    stages: Stages, stage: int, num_microbatches: int, direction: Direction
) -> Iterator[Computation]:
    """A stage's forwards, or its backwards, in order."""
    chunks = stages.chunks_of(stage)
    if direction is Direction.BACKWARD:
        chunks = chunks[::-1]
    for first in range(0, num_microbatches, stages.num_stages):
        last = min(first + stages.num_stages, num_microbatches)
        for chunk in chunks:
            for microbatch in range(first, last):
                yield Computation(direction=direction, microbatch=microbatch, chunk=chunk)
