"""The scheduler's promises, one by one; random histories are in ``test_scheduler_machine``."""

from __future__ import annotations

import pytest

from shoal.errors import ConfigError, Overloaded
from shoal.inference import FinishReason, Sequence, State
from tests.inference.world import END, World, limits, request


def _chunks(world: World) -> list[tuple[str, int, int, int]]:
    """(request, choice, start, count) of the last step."""
    return [entry[:4] for entry in world.trace[-1]]


def _answers(world: World, name: str) -> list[list[int]]:
    return [sequence.generated for sequence in world.live[name]]


def _expected(world: World, *prompt: int, count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(world.model.expected_token(tokens))
    return tokens[len(prompt) :]


def test_a_prompt_is_computed_in_chunks_and_decoded_token_by_token() -> None:
    world = World(limits=limits(max_step_tokens=6))
    (sequence,) = world.add(request("a", *range(3), 0, 1, 2, 3, max_tokens=3))
    states = [sequence.state]
    while world.scheduler.has_work:
        world.step()
        states.append(sequence.state)
    assert states == [State.WAITING, State.PREFILLING, State.DECODING, State.DECODING, "finished"]
    assert [entry[2:4] for step in world.trace for entry in step] == [
        (0, 6),
        (6, 1),
        (7, 1),
        (8, 1),
    ]
    assert sequence.generated == _expected(world, 0, 1, 2, 0, 1, 2, 3, count=3)
    assert sequence.finish_reason is FinishReason.LENGTH


def test_decoding_goes_on_while_a_long_prompt_is_computed() -> None:
    world = World(limits=limits(num_blocks=20))
    world.add(request("short", 1, max_tokens=9))
    world.step()
    world.add(request("long", *[2] * 15, max_tokens=2))
    for start in (0, 5, 10):
        world.step()
        assert _chunks(world)[0][0] == "short"
        assert _chunks(world)[1] == ("long", 0, start, 5)
    world.drain()


def test_choices_share_the_full_blocks_of_their_prompt() -> None:
    world = World(limits=limits(num_blocks=20, max_step_tokens=12))
    sequences = world.add(request("a", 0, 1, 2, 3, 0, n=4, max_tokens=3))
    world.step()
    # Each after the first computes only the token that fills no block.
    assert _chunks(world) == [("a", 0, 0, 5), ("a", 1, 4, 1), ("a", 2, 4, 1), ("a", 3, 4, 1)]
    assert len({tuple(sequence.blocks[:2]) for sequence in sequences}) == 1
    assert len({sequence.blocks[2] for sequence in sequences}) == 4
    world.drain()
    assert world.scheduler.stats().prefix_hit_tokens == 3 * 4
    assert [sequence.num_cached for sequence in sequences] == [0, 4, 4, 4]


def test_equal_answers_end_up_in_the_same_blocks() -> None:
    world = World(limits=limits(num_blocks=20, max_step_tokens=12))
    one, other = world.add(request("a", 0, 1, 2, n=2, max_tokens=8))
    for _ in range(7):
        world.step()
    assert one.tokens == other.tokens
    assert one.blocks[:4] == other.blocks[:4] and one.blocks[4] != other.blocks[4]
    assert world.scheduler.stats().kv_blocks_free == 20 - 4 - 2
    world.drain()


def test_what_was_answered_is_found_by_the_next_turn() -> None:
    world = World(limits=limits(num_blocks=20))
    world.add(request("first", 0, 1, 2, max_tokens=5))
    world.drain()
    (sequence,) = world.live["first"]
    world.add(request("second", *sequence.tokens, 3, max_tokens=1))
    world.step()
    # Of the 8 tokens all but the last were computed, and 3 blocks of 2 filled.
    assert _chunks(world) == [("second", 0, 6, 3)]
    assert world.live["second"][0].num_cached == 6


def test_without_a_prefix_cache_only_those_that_run_share() -> None:
    world = World(limits=limits(num_blocks=20, prefix_cache=False))
    first, second = world.add(request("a", 0, 1, 2, 3, 0, n=2, max_tokens=2))
    world.drain()
    assert (first.num_cached, second.num_cached) == (0, 4)
    world.add(request("b", 0, 1, 2, 3, 0, max_tokens=2))
    world.drain()
    assert world.live["b"][0].num_cached == 0


@pytest.mark.parametrize("num_prompt", [3, 4, 5])
def test_the_last_token_is_always_computed(num_prompt: int) -> None:
    world = World(limits=limits())
    prompt = [0, 1, 2, 3, 0][:num_prompt]
    for name in ("cold", "warm"):
        world.add(request(name, *prompt, max_tokens=2))
        world.drain()
    assert _answers(world, "cold") == _answers(world, "warm")
    assert world.live["warm"][0].num_cached == (num_prompt - 1) // 2 * 2


def test_a_cached_prefix_costs_no_budget() -> None:
    world = World(limits=limits(num_blocks=20, max_step_tokens=4))
    world.add(request("a", *[1] * 10, max_tokens=1))
    world.drain()
    world.add(request("b", *[1] * 10, 2, max_tokens=1))
    world.step()
    assert _chunks(world) == [("b", 0, 10, 1)]


def test_prompt_scores_are_computed_over_a_cached_prefix() -> None:
    world = World(limits=limits(num_blocks=20, max_step_tokens=5))
    prompt = [0, 1, 2, 3, 0, 1, 2]
    for name in ("cold", "warm"):
        world.add(request(name, *prompt, n=2, max_tokens=2, prompt_logprobs=0))
        world.drain()
    assert world.scored["cold"] == world.scored["warm"] == [0, 1, 2, 3, 4, 5]
    assert _answers(world, "cold") == _answers(world, "warm")
    # The choice that does not score takes the prefix from the cache.
    assert [sequence.num_cached for sequence in world.live["warm"]] == [0, 6]


def test_scores_that_were_handed_out_are_not_computed_again() -> None:
    world = World(limits=limits(block_size=1, num_blocks=10, max_step_tokens=2, max_running=2))
    world.add(request("first", 0, max_tokens=6))
    prompt = (1, 2, 3, 0, 1, 2, 3)
    (scores,) = world.add(request("scores", *prompt, max_tokens=1, prompt_logprobs=0))
    for _ in range(4):
        world.step()
    assert scores.num_preemptions == 1
    assert world.scored["scores"] == [0, 1, 2]
    world.drain()
    assert world.scored["scores"] == [0, 1, 2, 3, 4, 5]
    starts = [entry[2] for step in world.trace for entry in step if entry[0] == "scores"]
    assert starts == [0, 1, 2, 3, 5]


def test_a_request_of_no_tokens_scores_its_prompt_and_ends() -> None:
    world = World(limits=limits())
    (sequence,) = world.add(request("a", 0, 1, 2, 3, max_tokens=0, prompt_logprobs=0))
    went_on = world.step()
    assert went_on == [sequence] and sequence.generated == []
    assert sequence.finish_reason is FinishReason.LENGTH
    assert world.scored["a"] == [0, 1, 2]


def test_a_tight_pool_changes_no_answer() -> None:
    prompts = [(number % 4, 1, number % 3) for number in range(8)]
    roomy, tight = (World(limits=limits(num_blocks=blocks, max_waiting=99)) for blocks in (99, 7))
    for world in (roomy, tight):
        for number, prompt in enumerate(prompts):
            world.add(request(str(number), *prompt, n=1 + number % 2, max_tokens=9))
        world.drain()
    assert tight.scheduler.stats().preempted > 3 > 0 == roomy.scheduler.stats().preempted
    for number, prompt in enumerate(prompts):
        answer = _expected(tight, *prompt, count=9)
        for world in (roomy, tight):
            assert _answers(world, str(number)) == [answer] * (1 + number % 2)


def test_the_last_in_the_order_gives_up_its_blocks_and_its_place_is_kept() -> None:
    world = World(limits=limits(num_blocks=6, max_running=2))
    (first,) = world.add(request("first", 0, 1, 2, max_tokens=9))
    (second,) = world.add(request("second", 3, 2, 1, max_tokens=8))
    # Both hold three of the six blocks when the first asks for a fourth.
    for _ in range(5):
        world.step()
    assert (first.num_preemptions, second.num_preemptions) == (0, 1)
    assert (second.num_generated, second.state) == (4, State.WAITING)
    world.add(request("third", 1, max_tokens=1))
    assert _order(world) == ["first", "second", "third"]
    assert _answers(world, "second") == [_expected(world, 3, 2, 1, count=8)]


def test_a_block_is_kept_for_each_that_runs() -> None:
    world = World(limits=limits(num_blocks=4, max_running=2))
    world.add(request("first", 0, 1, 2, max_tokens=5))
    (second,) = world.add(request("second", 3, 2, 1, max_tokens=4))
    world.step()
    # Two blocks are free, but one of them is what the first will ask for next.
    assert second.state is State.WAITING
    world.drain()
    assert world.scheduler.stats().preempted == 0


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "field", "remedy"),
    [
        (24, None, "prompt", "Shorten it to at most 16"),
        (25, 1, "prompt", "Shorten it to at most 16"),
        (17, 0, "prompt", "Shorten it to at most 16"),
        (17, None, "prompt", "Shorten it to at most 16"),
        (10, 8, "max_tokens", "Lower it to at most 7"),
        (10, 10**9, "max_tokens", "Lower it to at most 7"),
        (16, 2, "max_tokens", "Lower it to at most 1"),
    ],
)
def test_what_can_never_fit_is_refused_and_others_go_on(
    prompt: int, max_tokens: int | None, field: str, remedy: str
) -> None:
    world = World(limits=limits())  # context of 24 tokens, pool of 16
    world.add(request("before", 1, max_tokens=2))
    with pytest.raises(ConfigError, match=remedy) as refusal:
        world.add(request("large", *[1] * prompt, max_tokens=max_tokens))
    assert refusal.value.field == field
    world.add(request("after", 2, max_tokens=2))
    world.drain()
    stats = world.scheduler.stats()
    assert (stats.finished, stats.refused) == (2, 1)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "length"),
    [(16, 0, 0), (16, 1, 1), (10, 7, 7), (10, None, 7), (16, None, 1)],
)
def test_what_just_fits_is_served(prompt: int, max_tokens: int | None, length: int) -> None:
    world = World(limits=limits())
    world.add(request("a", *[1] * prompt, max_tokens=max_tokens))
    world.drain()
    assert len(_answers(world, "a")[0]) == length


@pytest.mark.parametrize("max_tokens", [5, 10**9, None])
def test_an_answer_ends_with_the_context(max_tokens: int | None) -> None:
    world = World(limits=limits(num_blocks=20))
    world.add(request("a", *[1] * 20, max_tokens=max_tokens))
    world.drain()
    assert len(_answers(world, "a")[0]) == 4
    with pytest.raises(ConfigError, match=r"context of 24 tokens.*at most 23"):
        world.add(request("b", *[1] * 24))


def test_a_full_queue_turns_requests_away_as_a_whole() -> None:
    world = World(limits=limits(max_waiting=5, max_running=1))
    world.add(request("a", 1, n=3, max_tokens=1))
    with pytest.raises(Overloaded, match="3 of at most 5"):
        world.add(request("b", 1, n=3, max_tokens=1))
    world.add(request("c", 1, n=2, max_tokens=1))
    with pytest.raises(Overloaded):
        world.add(request("d", 1))
    with pytest.raises(ConfigError, match="at most 5"):
        world.add(request("e", 1, n=6))
    world.step()
    world.add(request("f", 1, max_tokens=1))
    world.drain()
    assert world.scheduler.stats().finished == 6


def test_an_id_under_way_is_refused() -> None:
    world = World(limits=limits())
    world.add(request("a", 1, max_tokens=1))
    with pytest.raises(ConfigError, match="under way"):
        world.scheduler.add(request("a", 2))
    world.drain()
    assert world.scheduler.add(request("a", 3))


@pytest.mark.parametrize("num_steps", [0, 1, 2, 4])
def test_an_abort_frees_everything_at_once_in_every_state(num_steps: int) -> None:
    world = World(limits=limits(num_blocks=20))
    sequences = world.add(request("a", *[1] * 9, n=2, max_tokens=5))
    world.add(request("b", 1, 2, max_tokens=9))
    for _ in range(num_steps):
        world.step()
    kept = sum(len(each.blocks) for each in world.live["b"])
    assert world.scheduler.abort("a") == sequences
    assert {each.finish_reason for each in sequences} == {FinishReason.ABORT}
    assert world.scheduler.stats().kv_blocks_free == 20 - kept
    assert world.scheduler.abort("a") == ()
    world.drain()
    assert _answers(world, "b") == [_expected(world, 1, 2, count=9)]


def test_a_request_aborted_while_it_is_computed_gets_nothing_more() -> None:
    world = World(limits=limits())
    (sequence,) = world.add(request("a", 1, 2, 3, max_tokens=5))
    world.step()
    assert world.step(abort_meanwhile="a") == []
    assert sequence.num_generated == 1
    assert not world.scheduler.has_work


def test_the_siblings_of_a_finished_choice_are_aborted() -> None:
    world = World(limits=limits())
    first, second = world.add(request("a", 1, 2, n=2, max_tokens=5))
    world.step()
    world.scheduler.finish(first)
    assert world.scheduler.abort("a") == (second,)
    assert (first.finish_reason, second.finish_reason) == (FinishReason.STOP, FinishReason.ABORT)


def test_an_abort_may_come_before_its_request() -> None:
    world = World(limits=limits(max_remembered_aborts=2))
    for name in ("forgotten", "kept", "kept too"):
        world.abort(name)
    for name, aborted in (("kept", True), ("kept too", True), ("forgotten", False)):
        (sequence,) = world.add(request(name, 1, max_tokens=1))
        assert sequence.is_finished is aborted
    # It holds for one request: the id may be used again.
    assert not world.scheduler.add(request("kept", 1))[0].is_finished


def _order(world: World) -> list[str]:
    """Requests in the order in which they are admitted."""
    seen: dict[str, None] = {}
    while world.scheduler.has_work:
        world.step()
        seen |= dict.fromkeys(entry[0] for entry in world.trace[-1])
    return list(seen)


def test_equals_are_served_first_come_first_served() -> None:
    world = World(limits=limits(max_running=1))
    for name in "abcde":
        world.add(request(name, 1, max_tokens=2))
    assert _order(world) == list("abcde")


def test_a_lower_priority_number_goes_first() -> None:
    world = World(limits=limits(max_running=1, priority_arrivals=100))
    for name, priority in (("a", 0), ("b", 1), ("c", -1), ("d", 0), ("e", -1)):
        world.add(request(name, 1, max_tokens=1, priority=priority))
    assert _order(world) == list("ceadb")


def test_nobody_is_overtaken_for_ever() -> None:
    world = World(limits=limits(max_running=1, priority_arrivals=3))
    world.add(request("patient", 1, max_tokens=1, priority=2))
    # Somebody more important comes with every step, and one of them is served with each.
    served = []
    for number in range(9):
        world.add(request(f"hurry {number}", 1, max_tokens=1))
        world.step()
        served.append(world.trace[-1][0][0])
    assert served.index("patient") == 2 * 3 - 1  # the sixth would stand beside it, and came later


def test_min_tokens_put_the_end_off() -> None:
    world = World(limits=limits(num_blocks=20))
    prompt = next(
        (a, b, c)
        for a in range(5)
        for b in range(5)
        for c in range(5)
        if _expected(world, a, b, c, count=4).count(END) == 2
        and _expected(world, a, b, c, count=4)[-1] == END
    )
    ends: list[Sequence] = []
    for min_tokens in (0, 3):
        name = str(min_tokens)
        ends += world.add(request(name, *prompt, min_tokens=min_tokens, ignore_eos=False))
    world.drain()
    early, late = ends
    assert early.num_generated < 4 == late.num_generated
    assert (early.stop_token, late.stop_token) == (END, END)


def test_stop_tokens_end_an_answer_and_stay_in_it() -> None:
    world = World(limits=limits(num_blocks=20))
    answer = _expected(world, 1, 2, count=8)
    stop = answer[3]
    (sequence,) = world.add(request("a", 1, 2, max_tokens=8, stop_token_ids=(stop,)))
    world.drain()
    assert sequence.generated == answer[: answer.index(stop) + 1]
    assert (sequence.finish_reason, sequence.stop_token) == (FinishReason.STOP, stop)


def test_a_failed_step_leaves_nothing_behind() -> None:
    world = World(limits=limits())
    world.add(request("a", 0, 1, 2, 3, 0, max_tokens=3))
    world.fail()
    assert world.scheduler.stats().kv_blocks_cached == 0
    world.add(request("again", 0, 1, 2, 3, 0, max_tokens=3))
    world.drain()
    assert world.live["again"][0].num_cached == 0
    assert _answers(world, "again") == [_expected(world, 0, 1, 2, 3, 0, count=3)]


def test_a_row_without_numbers_ends_its_sequence_alone() -> None:
    world = World(limits=limits())
    world.add(request("a", 0, 1, max_tokens=3))
    world.add(request("b", 1, 2, max_tokens=3))
    world.step(broken_row=True)
    assert world.live["b"][0].finish_reason is FinishReason.ERROR
    world.drain()
    assert _answers(world, "a") == [_expected(world, 0, 1, count=3)]
