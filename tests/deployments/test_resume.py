"""A stream that broke goes on where it broke: both parts are the stream that never did."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

from shoal.config import LimitSettings, ServeSettings
from shoal_deployments.engine_client import ModelCard
from tests.deployments.fake_engine import by_hash, spelling
from tests.deployments.server import Served, events_with_ids, serve

CHOICES = "héllo wörld 日本 😀 end"
PATHS = ["chat", "completions"]


def _ask(served: Served, path: str, last_id: str | None = None, **fields: Any) -> httpx2.Response:
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "stream": True} | fields
    if path == "chat":
        body.setdefault("messages", [{"role": "user", "content": "Hi"}])
    else:
        body.setdefault("prompt", "Hi")
    headers = {} if last_id is None else {"Last-Event-ID": last_id}
    where = f"/v1/{'chat/' if path == 'chat' else ''}completions"
    return served.http.post(where, json=body, headers=headers)


def _stream(served: Served, path: str, last_id: str | None = None, **fields: Any) -> list[Any]:
    answer = _ask(served, path, last_id, **fields)
    assert answer.status_code == 200, answer.text
    got = events_with_ids(answer.text)
    assert got.pop() == (None, "[DONE]")
    return got


def _summed(contents: list[Any]) -> dict[str, Any]:
    """What a list of chunks adds up to."""
    total: dict[str, Any] = {"heads": set(), "choices": {}, "usage": None}
    for content in contents:
        head = {name: content[name] for name in ("id", "created", "model", "system_fingerprint")}
        total["heads"].add(json.dumps(head))
        total["usage"] = content.get("usage") or total["usage"]
        for choice in content["choices"]:
            whole = total["choices"].setdefault(choice["index"], {"text": "", "roles": 0})
            delta = choice.get("delta", {})
            whole["text"] += choice.get("text") or delta.get("content") or ""
            whole["roles"] += "role" in delta
            assert "reason" not in whole, "nothing follows the end"
            if choice["finish_reason"]:
                whole["reason"] = choice["finish_reason"]
            for name, values in {
                "token_ids": choice.get("token_ids"),
                **(choice["logprobs"] or {}),
            }.items():
                if values is not None:
                    whole.setdefault(name, []).extend(values)
    return total


CASES: list[dict[str, Any]] = [
    {},
    {"n": 3},
    {"seed": 5, "n": 2, "return_token_ids": True},
    {"stop": ["wör", "zzz"], "max_tokens": 40},
    {"stop": ["lloX"], "max_tokens": 6},
    {"logprobs": True, "n": 2},
    {"logprobs": True, "stop": ["日"], "max_tokens": 40},
    {"stream_options": {"include_usage": True}},
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("spells", [True, False])
def test_both_parts_are_the_whole(
    served: Served, path: str, case: dict[str, Any], spells: bool
) -> None:
    served.engine.next_token = spelling(CHOICES, ends=True) if spells else by_hash
    fields = case | ({"logprobs": 2} if case.get("logprobs") and path == "completions" else {})
    whole = _stream(served, path, **fields)
    expected = _summed([content for _, content in whole])
    assert len({each for each, _ in whole}) == len(whole)
    for cut in range(1, len(whole) + 1):
        last_id = whole[cut - 1][0]
        rest = _stream(served, path, last_id, **fields)
        both = [content for _, content in whole[:cut] + rest]
        assert _summed(both) == expected, f"cut after {cut} of {len(whole)}"
        if cut < len(whole):
            assert rest[-1][0] == whole[-1][0]  # and the ids go on as well


@pytest.mark.parametrize("echo", [{}, {"logprobs": 1}])
@pytest.mark.parametrize("max_tokens", [0, 3])
def test_echoed_prompts_are_not_sent_twice(
    served: Served, echo: dict[str, Any], max_tokens: int
) -> None:
    fields: dict[str, Any] = {"prompt": ["é日", "ab"], "n": 2, "echo": True} | echo
    fields["max_tokens"] = max_tokens
    whole = _stream(served, "completions", **fields)
    expected = _summed([content for _, content in whole])
    for cut in range(1, len(whole) + 1):
        rest = _stream(served, "completions", whole[cut - 1][0], **fields)
        assert _summed([content for _, content in whole[:cut] + rest]) == expected


def test_a_stream_may_break_again_and_again(served: Served) -> None:
    whole = _stream(served, "completions", n=2, prompt=["a", "b"])
    pieces, last_id = whole[:1], whole[0][0]
    while True:
        rest = _stream(served, "completions", last_id, n=2, prompt=["a", "b"])
        if not rest:
            break
        pieces.append(rest[0])
        last_id = rest[0][0]
    contents = [content for _, content in pieces]
    assert _summed(contents) == _summed([content for _, content in whole])


def test_prompts_without_a_seed_have_draws_of_their_own(served: Served) -> None:
    whole = _summed([c for _, c in _stream(served, "completions", prompt=["a", "a"])])
    texts = [choice["text"] for choice in whole["choices"].values()]
    assert texts[0] != texts[1]
    seeds = {request.seed for request in served.engine.requests}
    assert len(seeds) == 2 and all(0 <= seed < 2**63 for seed in seeds)


def test_the_requests_have_names_of_their_own(served: Served) -> None:
    """The first attempt may still be under way when the client comes back."""
    whole = _stream(served, "completions")
    for _ in range(2):
        _stream(served, "completions", whole[0][0])
    names = [request.id for request in served.engine.requests]
    assert len(set(names)) == 3
    answer_id = whole[0][1]["id"]
    assert all(name.startswith(answer_id) for name in names)


def test_the_same_body_may_be_written_otherwise(served: Served) -> None:
    whole = _stream(served, "completions", stop="é")
    rest = _stream(served, "completions", whole[0][0], stop=["é"], user="me", top_p=None)
    assert _summed([c for _, c in whole[:1] + rest]) == _summed([c for _, c in whole])


def _spoilt(text: str) -> list[str]:
    head, counts, crc = text.split(".")
    return [
        "",
        "17",
        "x" * 10_000,
        text[:-1],
        text[:20],
        text + "0",
        f"{head}.{counts}1.{crc}",
        f"{head}..{crc}",
        f"B{head[1:]}.{counts}.{crc}",
        text.replace(".", ","),
        "é" * 80,
    ]


def test_what_is_no_id_is_refused(served: Served) -> None:
    event_id = _stream(served, "completions")[0][0]
    assert event_id is not None
    for spoilt in _spoilt(event_id):
        answer = served.http.post(
            "/v1/completions",
            json={"model": "tiny", "prompt": "Hi", "max_tokens": 12, "stream": True},
            headers={b"Last-Event-ID": spoilt.encode()},
        )
        assert answer.status_code == 400, spoilt
        error = answer.json()["error"]
        assert (error["param"], error["code"]) == ("Last-Event-ID", "invalid_event_id")
    twice = [("Last-Event-ID", event_id)] * 2
    body = {"model": "tiny", "prompt": "Hi", "max_tokens": 12, "stream": True}
    assert served.http.post("/v1/completions", json=body, headers=twice).status_code == 400


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_tokens": 13}, "answered another body"),
        ({"prompt": "Ho"}, "answered another body"),
        ({"prompt": [72, 105]}, "answered another body"),
        ({"stream_options": {"include_usage": True}}, "answered another body"),
        ({"n": 2}, "a stream of 1 choices, not 2"),
        ({"stream": None}, "asks for no stream"),
    ],
)
def test_another_request_is_refused(served: Served, change: dict[str, Any], message: str) -> None:
    event_id = _stream(served, "completions")[0][0]
    served.engine.requests.clear()
    refused = _ask(served, "completions", event_id, **change)
    assert refused.status_code == 400
    assert message in refused.json()["error"]["message"]
    assert served.engine.requests == []


def test_a_chat_does_not_go_on_with_a_completion(served: Served) -> None:
    event_id = _stream(served, "completions")[0][0]
    refused = _ask(served, "chat", event_id)
    assert refused.status_code == 400 and "another body" in refused.text


def test_other_weights_and_other_kernels_are_refused(served: Served) -> None:
    engine = served.engine
    event_id = _stream(served, "completions")[0][0]
    engine.fingerprint = "fp2"
    refused = _ask(served, "completions", event_id)
    assert refused.status_code == 400
    assert "no engine here has the kernels" in refused.json()["error"]["message"]
    assert refused.json()["error"]["param"] == "Last-Event-ID"
    engine.fingerprint = "fp1"
    card = engine.card
    try:
        engine.card = ModelCard(name="tiny", created=1, limits=card.limits, weights="w2")
        refused = _ask(served, "completions", event_id)
        assert refused.status_code == 400
        assert "of other weights" in refused.json()["error"]["message"]
    finally:
        engine.card = card
    assert _ask(served, "completions", event_id).status_code == 200


def test_what_promises_no_bits_has_no_ids(served: Served) -> None:
    served.engine.fingerprint = None
    got = _stream(served, "chat", n=2)
    assert {event_id for event_id, _ in got} == {None}


def test_the_official_client_reads_and_resumes(served: Served) -> None:
    served.engine.next_token = spelling(CHOICES, ends=True)
    served.engine.step_s = 0.005
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Hi"}],
        "stream": True,
    }
    client = served.sdk()
    text, event_id = "", None
    with client.chat.completions.with_streaming_response.create(**asked) as response:
        for line in response.iter_lines():
            if line.startswith("id: "):
                event_id = line.removeprefix("id: ")
            elif line.startswith("data: "):
                text += json.loads(line[6:])["choices"][0]["delta"].get("content", "")
                if len(text) >= 8:
                    break
    assert event_id is not None and text == CHOICES[: len(text)] != CHOICES
    rest = client.chat.completions.create(**asked, extra_headers={"Last-Event-ID": event_id})
    text += "".join(chunk.choices[0].delta.content or "" for chunk in rest)
    assert text == CHOICES


def test_a_long_repetition_shows_that_it_is_alive() -> None:
    settings = ServeSettings(limits=LimitSettings(keep_alive_s=0.05))
    with serve(settings) as served:
        served.engine.step_s = 0.01
        whole = _stream(served, "completions", max_tokens=40)
        answer = _ask(served, "completions", whole[-2][0], max_tokens=40)
        assert answer.text.count(": waiting\n") >= 2
        assert [content for _, content in events_with_ids(answer.text)][:-1] == [whole[-1][1]]
