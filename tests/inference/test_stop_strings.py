"""Stop strings end a text before them and never show, however the text was cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data import ByteTokenizer
from shoal.inference import ChoiceText, StopStrings, TokenTexts

TEXTS = TokenTexts(ByteTokenizer())


def _stream(stops: list[str], deltas: list[str]) -> tuple[list[str], str | None]:
    watch = StopStrings(stops)
    shown = []
    for delta in deltas:
        shown.append(watch.push(delta))
        if watch.matched is not None:
            return shown, watch.matched
    return [*shown, watch.finish()], None


def _naive(stops: list[str], text: str) -> tuple[str, str | None]:
    """Read character by character; of stops that end at the same one, take the longest."""
    for end in range(1, len(text) + 1):
        met = [stop for stop in stops if text[:end].endswith(stop)]
        if met:
            longest = max(met, key=len)
            return text[: end - len(longest)], longest
    return text, None


@settings(max_examples=400)
@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    deltas=st.lists(st.text("abc", max_size=4), max_size=8),
)
def test_any_cut_gives_the_same_text(stops: list[str], deltas: list[str]) -> None:
    shown, matched = _stream(stops, deltas)
    assert ("".join(shown), matched) == _naive(stops, "".join(deltas))


@settings(max_examples=200)
@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    deltas=st.lists(st.text("abc", max_size=4), max_size=8),
)
def test_no_more_is_held_back_than_could_be_a_stop(stops: list[str], deltas: list[str]) -> None:
    watch = StopStrings(stops)
    text = shown = ""
    for delta in deltas:
        text += delta
        shown += watch.push(delta)
        if watch.matched is not None:
            return
        held = text[len(shown) :]
        assert text.startswith(shown)
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


@pytest.mark.parametrize(
    ("stops", "deltas", "shown", "matched"),
    [
        (["\n\nUser:"], ["Hi", "\n", "\n", "Us", "er", ":", "no"], "Hi", "\n\nUser:"),
        (["ab", "abc"], ["xa", "bc"], "x", "ab"),
        (["abc", "c"], ["xab", "c"], "x", "abc"),
        (["bcd", "c"], ["abcd"], "ab", "c"),
        (["END"], ["the E", "N", "D"], "the ", "END"),
        (["END"], ["the E", "N"], "the EN", None),
        (["aab"], ["a", "a", "a", "b"], "a", "aab"),
        (["stop"], ["stop"], "", "stop"),
        ([], ["a", "b"], "ab", None),
    ],
)
def test_named_cases(stops: list[str], deltas: list[str], shown: str, matched: str | None) -> None:
    pieces, stop = _stream(stops, deltas)
    assert ("".join(pieces), stop) == (shown, matched)


def _answer(text: ChoiceText, tokens: bytes) -> tuple[str, str, str | None]:
    """Shown text, text of all tokens, and the stop string."""
    shown = pieces = ""
    for token in tokens:
        delta = text.push(token)
        assert delta.offset == len(pieces)
        shown, pieces = shown + delta.shown, pieces + delta.piece
        if delta.stop is not None:
            return shown, pieces, delta.stop
    delta = text.finish()
    assert delta.offset == len(pieces)
    return shown + delta.shown, pieces + delta.piece, delta.stop


def test_a_stop_string_of_many_byte_characters() -> None:
    tokens = "wave 👋 then 世界 more".encode()
    assert _answer(ChoiceText(TEXTS, ["世界"]), tokens) == (
        "wave 👋 then ",
        "wave 👋 then 世界",
        "世界",
    )
    assert _answer(ChoiceText(TEXTS, ["世x"]), tokens)[0] == tokens.decode()


def test_text_held_back_at_the_end_is_shown() -> None:
    assert _answer(ChoiceText(TEXTS, ["\n\n"]), b"done\n") == ("done\n", "done\n", None)


def test_a_cut_character_may_complete_a_stop_string() -> None:
    shown = _answer(ChoiceText(TEXTS, ["x\ufffd"]), b"ax" + "👋".encode()[:2])
    assert shown == ("a", "ax\ufffd", "x\ufffd")


def test_stop_strings_wait_for_min_tokens() -> None:
    tokens = b"a.b.c.d"
    assert _answer(ChoiceText(TEXTS, ["."]), tokens)[0] == "a"
    assert _answer(ChoiceText(TEXTS, ["."], min_tokens=2), tokens)[0] == "a.b"
    # A stop string that began before is not looked for.
    assert _answer(ChoiceText(TEXTS, ["b."], min_tokens=3), tokens)[0] == "a.b.c.d"


def test_the_token_that_ends_an_answer_has_no_text() -> None:
    text = ChoiceText(TEXTS)
    text.push(ord("a"))
    delta = text.push(ord("!"), is_text=False)
    assert (delta.shown, delta.piece, delta.offset) == ("", "", 1)
    assert text.finish().shown == ""
