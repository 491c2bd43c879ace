"""A stream says the same as the whole answer, event by event."""

from __future__ import annotations

from typing import Any

import pytest

from tests.deployments.fake_engine import spelling
from tests.deployments.server import Served, events

HELD = "héllo wörld 日本 😀 end"


def _streamed(served: Served, path: str, **fields: Any) -> dict[int, dict[str, Any]]:
    """The choices that a stream adds up to, after checks of its form."""
    post = served.chat if path == "chat" else served.complete
    got = events(post(**fields, stream=True))
    assert got.count("[DONE]") == 1 and got[-1] == "[DONE]"
    choices: dict[int, dict[str, Any]] = {}
    for event in got[:-1]:
        for choice in event["choices"]:
            whole = choices.setdefault(choice["index"], {"text": "", "ids": [], "reason": None})
            assert whole["reason"] is None, "nothing follows the finish reason"
            whole["text"] += choice["text"] if "text" in choice else _content(choice)
            whole["ids"] += choice.get("token_ids", [])
            whole["reason"] = choice["finish_reason"]
            for name, values in (choice["logprobs"] or {}).items():
                if values is not None:
                    whole.setdefault(name, []).extend(values)
    assert all(choice["reason"] for choice in choices.values())
    return choices


def _content(choice: dict[str, Any]) -> str:
    content: str = choice["delta"].get("content", "")
    return content


def _whole(served: Served, path: str, **fields: Any) -> dict[int, dict[str, Any]]:
    """The choices of an answer in one piece, in the same form."""
    post = served.chat if path == "chat" else served.complete
    response = post(**fields)
    assert response.status_code == 200, response.text
    choices = {}
    for choice in response.json()["choices"]:
        logprobs = choice["logprobs"] or {}
        choices[choice["index"]] = {
            "text": choice["text"] if "text" in choice else choice["message"]["content"],
            "ids": choice.get("token_ids", []),
            "reason": choice["finish_reason"],
        } | {name: values for name, values in logprobs.items() if values is not None}
    return choices


def _both(served: Served, path: str, **fields: Any) -> dict[int, dict[str, Any]]:
    """The choices, after a check that both ways give the same."""
    whole = _whole(served, path, **fields)
    assert _streamed(served, path, **fields) == whole
    return whole


@pytest.mark.parametrize("path", ["chat", "completions"])
@pytest.mark.parametrize("step_s", [0.0, 0.003])
def test_the_same_either_way(served: Served, path: str, step_s: float) -> None:
    served.engine.step_s = step_s
    choices = _both(served, path, n=3, seed=5, max_tokens=20, return_token_ids=True)
    assert list(choices) == [0, 1, 2]
    assert len({choice["text"] for choice in choices.values()}) == 3
    assert {len(choice["ids"]) for choice in choices.values()} == {20}


def test_seeds_reach_the_engine(served: Served) -> None:
    for post in (served.complete, served.chat):
        first, again, other = (post(seed=seed, max_tokens=20).json() for seed in (1, 1, 2))
        for answer in (first, again, other):
            answer["choices"][0].pop("index")
        assert first["choices"] == again["choices"]
        assert first["choices"] != other["choices"]
    fresh = [served.complete(max_tokens=20).json()["choices"][0]["text"] for _ in range(2)]
    assert fresh[0] != fresh[1]


def test_the_engine_sees_what_was_asked(served: Served) -> None:
    asked = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.3,
        "repetition_penalty": 1.1,
        "seed": 11,
        "min_tokens": 2,
        "ignore_eos": True,
        "priority": 3,
        "max_tokens": 5,
    }
    served.complete(**asked, stop=["x", "yz"], stop_token_ids=[7], logit_bias={"66": 1.5, "65": -2})
    params = served.engine.requests[-1].params
    assert {name: getattr(params, name) for name in asked} == asked
    assert params.stop == ("x", "yz")
    assert params.stop_token_ids == (7,)
    assert params.logit_bias == ((65, -2), (66, 1.5))
    served.chat(max_tokens=None, max_completion_tokens=6)
    params = served.engine.requests[-1].params
    assert (params.max_tokens, params.temperature, params.n) == (6, 1.0, 1)


@pytest.mark.parametrize("stream", [False, True])
def test_usage_counts_every_choice_and_each_prompt_once(served: Served, stream: bool) -> None:
    asked: dict[str, Any] = {"prompt": [[65, 66], [67, 68, 69]], "n": 3, "max_tokens": 5}
    if stream:
        options = {"include_usage": True}
        got = events(served.complete(**asked, stream=True, stream_options=options))
        assert [event["usage"] for event in got[:-2]] == [None] * (len(got) - 2)
        assert got[-2]["choices"] == []
        usage = got[-2]["usage"]
        plain = events(served.complete(**asked, stream=True))
        assert all("usage" not in event for event in plain[:-1])
    else:
        usage = served.complete(**asked).json()["usage"]
    assert usage == {
        "prompt_tokens": 5,
        "completion_tokens": 30,
        "total_tokens": 35,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


@pytest.mark.parametrize("path", ["chat", "completions"])
def test_every_choice_has_its_reason(served: Served, path: str) -> None:
    for place in range(10):
        served.engine.next_token = spelling("abcde", ends=True)
        ends = _both(served, path, n=2, max_tokens=3 + place)
        expected = "length" if 3 + place <= 5 else "stop"
        assert {choice["reason"] for choice in ends.values()} == {expected}
        stopped = _both(served, path, n=2, stop=["d"], max_tokens=3 + place)
        expected = "length" if place == 0 else "stop"
        assert {choice["reason"] for choice in stopped.values()} == {expected}


@pytest.mark.parametrize("path", ["chat", "completions"])
@pytest.mark.parametrize(
    ("stop", "max_tokens", "text", "reason"),
    [
        (["lo wö"], 40, "hél", "stop"),
        (["zzz", "wörld 日", "wör"], 40, "héllo ", "stop"),
        (["end"], 40, "héllo wörld 日本 😀 ", "stop"),
        ("llo", 40, "hé", "stop"),
        (["lloX"], 6, "héllo", "length"),  # half met at the end: what was held is shown
        (["endless"], 60, HELD, "stop"),
        (["h"], 40, "", "stop"),
    ],
)
def test_stop_texts_do_not_leak(
    served: Served, path: str, stop: Any, max_tokens: int, text: str, reason: str
) -> None:
    served.engine.next_token = spelling(HELD, ends=True)
    served.engine.step_s = 0.001
    choice = _both(served, path, stop=stop, max_tokens=max_tokens)[0]
    assert (choice["text"], choice["reason"]) == (text, reason)


@pytest.mark.parametrize(
    ("stop", "max_tokens"),
    [(["lo wö"], 40), (["o", "ld 日"], 40), (["lloX"], 6), (["llo"], 40), ("h", 40), ("X", 2)],
)
def test_pieces_of_a_stopped_text_are_the_text(served: Served, stop: Any, max_tokens: int) -> None:
    served.engine.next_token = spelling(HELD, ends=True)
    choice = _both(served, "completions", stop=stop, max_tokens=max_tokens, logprobs=1)[0]
    assert "".join(choice["tokens"]) == choice["text"]
    assert choice["text_offset"] == sorted(choice["text_offset"])
    asked = {"stop": stop, "max_tokens": max_tokens, "return_token_ids": True}
    ids = _both(served, "chat", **asked)[0]["ids"]
    content = _both(served, "chat", **asked, logprobs=True)[0]["content"]
    assert len(content) == len(ids) == len(choice["tokens"])
    own = [[token] if token < 256 else None for token in ids]  # those of the stop text too
    assert [entry["bytes"] for entry in content] == own


def test_the_reason_for_a_stop_is_told(served: Served) -> None:
    served.engine.next_token = spelling("abc", ends=True)
    told = served.complete(stop=["c"]).json()["choices"][0]["stop_reason"]
    assert told == "c"
    told = served.complete(stop_token_ids=[98]).json()["choices"][0]
    assert (told["stop_reason"], told["text"]) == (98, "a")
    assert "stop_reason" not in served.complete().json()["choices"][0]


@pytest.mark.parametrize("path", ["chat", "completions"])
def test_characters_are_not_split(served: Served, path: str) -> None:
    served.engine.next_token = spelling("日本😀")
    served.engine.step_s = 0.001
    for max_tokens in range(1, 12):
        text = _both(served, path, max_tokens=max_tokens)[0]["text"]
        assert "\ufffd" not in text[:-1]
        full = "日本😀".encode() * 2
        # A tail that was cut is one U+FFFD, as in the tokenizer's own decode.
        assert text == full[:max_tokens].decode(errors="replace")
    choice = _both(served, "completions", max_tokens=8, logprobs=0)[0]
    assert "".join(choice["tokens"]) == "日本\ufffd"


@pytest.mark.parametrize("prompt", ["Hi there", "é日", "x", [72, 105], [0xE6, 0x97]])
@pytest.mark.parametrize("max_tokens", [0, 5])
@pytest.mark.parametrize("n", [1, 2])
def test_echo_with_logprobs(served: Served, prompt: Any, max_tokens: int, n: int) -> None:
    asked = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": max_tokens, "n": n}
    choices = _both(served, "completions", **asked, seed=3)
    num_prompt = len(prompt.encode() if isinstance(prompt, str) else prompt)
    for choice in choices.values():
        assert len(choice["tokens"]) == num_prompt + max_tokens
        assert "".join(choice["tokens"]) == choice["text"]
        for piece, offset in zip(choice["tokens"], choice["text_offset"], strict=True):
            assert choice["text"][offset : offset + len(piece)] == piece
        assert choice["text_offset"] == sorted(choice["text_offset"])
        assert choice["token_logprobs"][0] is None and choice["top_logprobs"][0] is None
        assert None not in choice["token_logprobs"][1:]
        if isinstance(prompt, str):
            assert choice["text"].startswith(prompt)


@pytest.mark.parametrize("prompt", ["é日", [195, 169, 66]])
def test_echo_alone(served: Served, prompt: Any) -> None:
    choices = _both(served, "completions", prompt=prompt, echo=True, max_tokens=2, n=2, seed=1)
    for choice in choices.values():
        start = prompt if isinstance(prompt, str) else "éB"
        assert choice["text"].startswith(start) and len(choice["text"]) == len(start) + 2
    only = _both(served, "completions", prompt=prompt, echo=True, max_tokens=0)[0]
    assert (only["text"], only["reason"]) == (start, "length")


def test_no_logprobs_beside_the_chosen(served: Served) -> None:
    choice = _both(served, "completions", logprobs=0, seed=1)[0]
    pairs = zip(choice["top_logprobs"], choice["tokens"], strict=True)
    assert [top == {piece: -0.25} for top, piece in pairs] == [True] * 4
    assert served.complete().json()["choices"][0]["logprobs"] is None


def test_token_ids(served: Served) -> None:
    asked = {"return_token_ids": True, "seed": 1}
    whole = served.complete(prompt=["Hi", "Ho"], **asked).json()
    assert [choice["prompt_token_ids"] for choice in whole["choices"]] == [[72, 105], [72, 111]]
    assert bytes(whole["choices"][0]["token_ids"]).decode() == whole["choices"][0]["text"]
    chat = served.chat(**asked).json()
    assert chat["prompt_token_ids"] == list(served.engine.requests[-1].prompt)
    got = events(served.chat(**asked, stream=True))
    assert got[0]["prompt_token_ids"] == chat["prompt_token_ids"]
    assert all("prompt_token_ids" not in event for event in got[1:-1])


def test_events_are_ascii_lines(served: Served) -> None:
    served.engine.next_token = spelling("a\u2028b\x85c\r\n\n")
    response = served.chat(stream=True, max_tokens=12)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.content.isascii()
    for block in response.text.split("\n\n")[:-1]:
        *heads, data = block.splitlines()
        assert data.startswith("data: ")
        assert len(heads) == (data != "data: [DONE]") and all(map(_names_an_event, heads))


def _names_an_event(line: str) -> bool:
    return line.startswith("id: ")
