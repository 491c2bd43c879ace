"""How many failures a run survives, and how long it waits after each."""

from __future__ import annotations

from shoal_actors.train.budget import LONGEST_DELAY_S, Budget


def _delays(budget: Budget, *after_progress: bool) -> list[float | None]:
    """The delay after each of these failures; None where the budget is spent."""
    delays: list[float | None] = []
    for number, is_after_progress in enumerate(after_progress):
        budget.count({"number": number}, is_after_progress=is_after_progress)
        delays.append(None if budget.is_spent else budget.delay_s)
    return delays


def test_failures_in_one_place_are_counted_and_come_slower() -> None:
    assert _delays(Budget(3), True, False, False, False) == [0.0, 2.0, 4.0, None]
    assert _delays(Budget(0), False) == [None]


def test_a_run_that_gets_on_fails_as_often_as_it_must() -> None:
    assert _delays(Budget(1), *[True] * 99) == [0.0] * 99
    budget = Budget(2)
    assert _delays(budget, False, False, True, False, False) == [0.0, 2.0, 0.0, 2.0, None]
    assert [failure["number"] for failure in budget.streak] == [2, 3, 4]


def test_the_delay_has_a_limit() -> None:
    delays = _delays(Budget(2000), *[False] * 2000)
    assert delays[:9] == [0.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0]
    assert set(delays[9:]) == {LONGEST_DELAY_S}
