"""Schedules of a pipeline, run by a simulator that knows channels and nothing of how they arise."""

from __future__ import annotations

from collections import deque

import pytest

from shoal.parallel.pipeline import Action, ActionKind, Stages, actions_of, make_timeline
from shoal.parallel.pipeline.timeline import (
    Direction,
    before_backwards,
    bubble_share,
    in_flight_limit,
)

SHAPES = [
    (stages, virtual, microbatches)
    for stages in (1, 2, 3, 4, 7)
    for virtual in (1, 2, 3)
    for microbatches in (1, 2, 3, 4, 6, 9, 14)
    if stages > 1 or virtual == 1
]

_Channel = tuple[int, int, str]
"""Sender, receiver and what travels: messages of one channel arrive in the order of sending."""


class _Simulator:
    """Stages that act in turn; a message is there once its receive was begun and its send too."""

    def __init__(self, stages: Stages, num_microbatches: int) -> None:
        self.stages = stages
        timeline = make_timeline(stages, num_microbatches)
        self.left = [deque(actions_of(timeline, s)) for s in range(stages.num_stages)]
        self.sent: dict[_Channel, deque[tuple[int, int]]] = {}
        self.awaited: dict[_Channel, deque[tuple[int, int]]] = {}
        self.arrived: set[tuple[str, int, int]] = set()
        self.forward: set[tuple[int, int]] = set()
        self.backward: list[tuple[int, int]] = []
        self.most_in_flight = [0] * stages.num_stages
        self.in_flight = [0] * stages.num_stages

    def run(self) -> None:
        """Act until nobody can."""
        moved = True
        while moved:
            moved = False
            for stage, actions in enumerate(self.left):
                while actions and self._act(stage, actions[0]):
                    actions.popleft()
                    moved = True

    def _act(self, stage: int, action: Action) -> bool:
        """Whether the action could be done."""
        assert self.stages.stage_of(action.chunk) == stage
        message = (action.microbatch, action.chunk)
        match action.kind:
            case ActionKind.FORWARD:
                return self._forward(stage, message)
            case ActionKind.BACKWARD:
                return self._backward(stage, message)
            case ActionKind.SEND_ACTIVATION:
                assert message in self.forward
                self._send("activation", message, self._next(message, 1))
            case ActionKind.SEND_GRADIENT:
                assert message in self.backward
                self._send("gradient", message, self._next(message, -1))
            case ActionKind.RECEIVE_ACTIVATION:
                self._receive("activation", self._next(message, -1), message)
            case ActionKind.RECEIVE_GRADIENT:
                self._receive("gradient", self._next(message, 1), message)
        return True

    def _forward(self, stage: int, message: tuple[int, int]) -> bool:
        if message[1] > 0 and ("activation", *message) not in self.arrived:
            return False
        assert message not in self.forward
        self.forward.add(message)
        self.in_flight[stage] += 1
        self.most_in_flight[stage] = max(self.most_in_flight[stage], self.in_flight[stage])
        return True

    def _backward(self, stage: int, message: tuple[int, int]) -> bool:
        is_last = message[1] == self.stages.num_chunks - 1
        if not is_last and ("gradient", *message) not in self.arrived:
            return False
        assert message in self.forward and message not in self.backward
        self.backward.append(message)
        self.in_flight[stage] -= 1
        return True

    def _next(self, message: tuple[int, int], step: int) -> tuple[int, int]:
        return message[0], message[1] + step

    def _send(self, what: str, message: tuple[int, int], target: tuple[int, int]) -> None:
        channel = self._channel(what, message, target)
        self.sent.setdefault(channel, deque()).append(target)
        self._match(what, channel)

    def _receive(self, what: str, source: tuple[int, int], message: tuple[int, int]) -> None:
        channel = self._channel(what, source, message)
        self.awaited.setdefault(channel, deque()).append(message)
        self._match(what, channel)

    def _channel(self, what: str, source: tuple[int, int], target: tuple[int, int]) -> _Channel:
        sender, receiver = self.stages.stage_of(source[1]), self.stages.stage_of(target[1])
        return sender, receiver, what

    def _match(self, what: str, channel: _Channel) -> None:
        sent, awaited = (x.setdefault(channel, deque()) for x in (self.sent, self.awaited))
        while sent and awaited:
            assert sent[0] == awaited[0], "the order of receives is that of sends"
            self.arrived.add((what, *sent.popleft()))
            awaited.popleft()


@pytest.mark.parametrize(("num_stages", "virtual", "num_microbatches"), SHAPES)
def test_every_microbatch_goes_through_and_back(
    num_stages: int, virtual: int, num_microbatches: int
) -> None:
    stages = Stages(num_stages=num_stages, virtual=virtual)
    simulator = _Simulator(stages, num_microbatches)
    simulator.run()
    assert not any(simulator.left), "nobody is stuck"
    everything = {(m, c) for m in range(num_microbatches) for c in range(stages.num_chunks)}
    assert simulator.forward == everything and set(simulator.backward) == everything
    assert not any(simulator.sent.values()) and not any(simulator.awaited.values())
    for chunk in range(stages.num_chunks):
        order = [m for m, c in simulator.backward if c == chunk]
        assert order == sorted(order), "the last microbatch ends the gradients of each chunk"
    for stage, most in enumerate(simulator.most_in_flight):
        assert most <= in_flight_limit(stages, stage)
        timeline = make_timeline(stages, num_microbatches)
        assert timeline.most_in_flight(stage, lambda chunk: 1) == most


@pytest.mark.parametrize("num_stages", range(1, 7))
@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 6, 13])
def test_without_virtual_stages_one_forward_follows_one_backward(
    num_stages: int, num_microbatches: int
) -> None:
    timeline = make_timeline(Stages(num_stages=num_stages), num_microbatches)
    for stage, order in enumerate(timeline.orders):
        warm_up = min(num_stages - stage - 1, num_microbatches)
        letters = "F" * warm_up + "FB" * (num_microbatches - warm_up) + "B" * warm_up
        assert "".join(c.direction[0].upper() for c in order) == letters
        for direction in Direction:
            done = [c.microbatch for c in order if c.direction is direction]
            assert done == list(range(num_microbatches))


@pytest.mark.parametrize(
    ("num_stages", "virtual", "groups"),
    [(s, v, g) for s in (2, 3, 4, 8) for v in (1, 2, 4) for g in (1, 2, 5)],
)
def test_the_bubble_is_the_least_possible(num_stages: int, virtual: int, groups: int) -> None:
    num_microbatches = num_stages * groups
    stages = Stages(num_stages=num_stages, virtual=virtual)
    share = make_timeline(stages, num_microbatches).bubble_share
    # the first microbatch's way to the last stage, and the last one's way back
    expected = (num_stages - 1) / (virtual * num_microbatches + num_stages - 1)
    assert share == pytest.approx(expected)


def test_a_part_of_a_group_costs_less_than_a_whole_one() -> None:
    stages = Stages(num_stages=4, virtual=2)
    durations = [make_timeline(stages, n).duration for n in range(1, 13)]
    assert durations == sorted(durations)


def test_activations_in_flight_weigh_by_chunk() -> None:
    timeline = make_timeline(Stages(num_stages=2, virtual=2), 4)
    # stage 0 begins 0 1 a b 2, goes back with a, and then holds all four and b
    assert timeline.most_in_flight(0, lambda chunk: 10 if chunk == 0 else 1) == 41
    assert timeline.most_in_flight(1, lambda chunk: 1) == in_flight_limit(timeline.stages, 1) == 3


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
@pytest.mark.parametrize("virtual", [1, 2, 3])
def test_what_is_known_without_playing_a_step_through(num_stages: int, virtual: int) -> None:
    stages = Stages(num_stages=num_stages, virtual=virtual if num_stages > 1 else 1)
    for num_microbatches in range(1, 17):
        timeline = make_timeline(stages, num_microbatches)
        share = bubble_share(stages, num_microbatches)
        assert share == pytest.approx(timeline.bubble_share, abs=1e-12), num_microbatches
        for stage in range(num_stages):
            waiting = before_backwards(stages, stage, num_microbatches, lambda chunk: 7 + chunk)
            most = timeline.most_in_flight(stage, lambda chunk: 7 + chunk)
            assert max(waiting.values()) == most, (num_microbatches, stage)
