"""Where requests go: affinity against load, and ties."""

from __future__ import annotations

from shoal_actors.engine import Load, Router

SIZE = 4
PROMPT = tuple(range(41))


def loads(*sequences: int) -> list[Load]:
    return [Load(place=place, sequences=number) for place, number in enumerate(sequences)]


def test_a_prompt_that_nobody_has_seen_goes_to_the_least_loaded() -> None:
    router = Router()
    names = router.names(PROMPT, SIZE)
    assert len(names) == 10
    assert router.ranked(names, loads(3, 1, 2)) == [1, 2, 0]
    assert router.ranked([], loads(0, 0, 0)) == [0, 1, 2]
    assert router.ranked(names, []) == []


def test_the_last_token_is_never_shared() -> None:
    router = Router()
    assert router.names((1, 2, 3, 4), SIZE) == []
    assert len(router.names((1, 2, 3, 4, 5), SIZE)) == 1


def test_affinity_wins_at_equal_load_and_loses_to_much_of_it() -> None:
    router = Router()
    names = router.names(PROMPT, SIZE)
    router.note(names, 1)
    assert router.ranked(names, loads(5, 5)) == [1, 0]
    assert router.ranked(names, loads(1, 2)) == [1, 0]
    assert router.ranked(names, loads(0, 20)) == [0, 1]
    longer = router.names((*PROMPT[:-1], *range(900, 921)), SIZE)
    assert router.ranked(longer, loads(2, 2, 2)) == [1, 0, 2]
    other = router.names((9, *PROMPT), SIZE)
    assert router.ranked(other, loads(2, 2)) == [0, 1]  # the same blocks, after another beginning


def test_among_equal_matches_the_less_loaded_wins_then_the_lower_place() -> None:
    router = Router()
    names = router.names(PROMPT, SIZE)
    for place in (2, 1, 0):
        router.note(names, place)
    assert router.ranked(names, loads(7, 6, 6)) == [1, 2, 0]


def test_ties_are_broken_by_how_the_prompt_begins() -> None:
    router = Router()
    names = router.names(PROMPT, SIZE)
    assert router.ranked(names, loads(3, 3, 3, 9), start=6) == [2, 0, 1, 3]
    assert router.ranked(names, loads(2, 3, 3, 2), start=1) == [3, 0, 1, 2]
    router.note(names, 0)
    router.note(names, 2)
    assert router.ranked(names, loads(3, 3, 3), start=1) == [2, 0, 1]
    assert router.ranked(names, [], start=5) == []
    longer, other = (*PROMPT[:SIZE], 99), (99, *PROMPT)
    assert router.start(longer, SIZE) == router.start(PROMPT, SIZE) != router.start(other, SIZE)
    firsts = [router.start((token,), SIZE) % 4 for token in range(400)]
    assert all(60 < firsts.count(place) < 140 for place in range(4))


def test_an_engine_that_starts_anew_is_not_believed_to_have_anything() -> None:
    router = Router()
    names = router.names(PROMPT, SIZE)
    router.note(names, 1)
    router.forget(1)
    router.forget(5)
    assert router.ranked(names, loads(0, 0)) == [0, 1]


def test_the_oldest_blocks_are_forgotten_and_the_ends_of_prompts_first() -> None:
    router = Router(capacity=10)
    names = router.names(PROMPT, SIZE)
    router.note(names, 1)
    router.note(router.names((7,) * 21, SIZE), 1)  # five more
    assert router.ranked(names, loads(1, 1)) == [1, 0]
    router.note(router.names((8,) * 41, SIZE), 1)  # ten more
    assert router.ranked(names, loads(1, 1)) == [0, 1]
