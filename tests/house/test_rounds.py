"""What is done every so many seconds: until it is told to stop, by others or by itself."""

from __future__ import annotations

import threading
import time

from shoal.rounds import Rounds

DEADLINE_S = 30.0


def test_no_round_outlasts_the_block() -> None:
    begun: list[None] = []
    ended: list[None] = []
    two = threading.Event()

    def visit() -> None:
        begun.append(None)
        if len(begun) == 2:
            two.set()
        time.sleep(0.01)
        ended.append(None)

    with Rounds(visit, every_s=0.0, name="visits"):
        assert two.wait(DEADLINE_S)
    assert len(begun) == len(ended) >= 2


def test_a_visit_may_be_the_last() -> None:
    visits: list[None] = []
    stopped = threading.Event()

    def visit() -> None:
        visits.append(None)
        if len(visits) == 3:
            rounds.stop()
            stopped.set()

    rounds = Rounds(visit, every_s=0.0, name="visits")
    with rounds:
        assert stopped.wait(DEADLINE_S)
    assert len(visits) == 3
