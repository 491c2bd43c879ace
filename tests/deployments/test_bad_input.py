"""What is wrong is refused with the field's name, before any event, and harms nobody."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from shoal.inference import Limits, SamplingParams
from tests.deployments.fake_engine import FakeEngine
from tests.deployments.server import Served, serve

HUGE = 10**6
PROMPT_512 = [65] * 512
MESSAGE = {"role": "user", "content": "Hi"}

# Fields laid over a good completion, and the parameter that the refusal names.
COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    # how many
    ({"n": 0}, "n"),
    ({"n": -1}, "n"),
    ({"n": HUGE}, "n"),
    ({"n": 10**30}, "n"),
    ({"n": 10**12, "stream": True}, "n"),
    ({"n": 2, "prompt": ["x"] * 33}, "n"),
    ({"n": True}, "n"),
    ({"n": "2"}, "n"),
    ({"n": 2.0}, "n"),
    ({"best_of": 2}, "best_of"),
    ({"best_of": HUGE}, "best_of"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"min_tokens": 9}, "min_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    # prompts
    ({"prompt": ""}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [[65], []]}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": {"text": "x"}}, "prompt"),
    ({"prompt": ["x", 65]}, "prompt"),
    ({"prompt": [65, "x"]}, "prompt"),
    ({"prompt": [[65], "x"]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [65.0]}, "prompt"),
    ({"prompt": [[65, None]]}, "prompt"),
    ({"prompt": [257]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [10**30]}, "prompt"),
    ({"prompt": [[65], [10**30]], "stream": True}, "prompt"),
    ({"prompt": ["x"] * 65}, "prompt"),
    ({"prompt": ["x"] * 10_000}, "prompt"),
    ({"prompt": [[]] * 10_000}, "prompt"),
    ({"prompt": PROMPT_512}, "prompt"),
    ({"prompt": [*PROMPT_512, 65]}, "prompt"),
    ({"prompt": [*PROMPT_512, 65], "max_tokens": 0}, "prompt"),
    ({"prompt": "x" * 100_000}, "prompt"),
    # sampling
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": []}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -1}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": -0.1}, "min_p"),
    ({"min_p": 2}, "min_p"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -2.5}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 1e-300}, "repetition_penalty"),
    ({"seed": -1}, "seed"),
    ({"seed": 2**63}, "seed"),
    ({"seed": True}, "seed"),
    ({"seed": 1.0}, "seed"),
    ({"seed": "1"}, "seed"),
    ({"priority": 101}, "priority"),
    ({"priority": 0.5}, "priority"),
    # ids in side fields
    ({"logit_bias": {"257": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"abc": 1}}, "logit_bias"),
    ({"logit_bias": {"": 1}}, "logit_bias"),
    ({"logit_bias": {"01": 1}}, "logit_bias"),
    ({"logit_bias": {"\u0661": 1}}, "logit_bias"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ({"logit_bias": {"65": 1e9}}, "logit_bias[65]"),
    ({"logit_bias": {"65": None}}, "logit_bias[65]"),
    ({"logit_bias": {"65": "1"}}, "logit_bias[65]"),
    ({"logit_bias": {str(key): 1 for key in range(10_000)}}, "logit_bias"),
    ({"logit_bias": [65]}, "logit_bias"),
    ({"stop_token_ids": [257]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"stop_token_ids": ["abc"]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [1] * 100_000}, "stop_token_ids"),
    ({"stop_token_ids": 65}, "stop_token_ids"),
    # stops
    ({"stop": ""}, "stop[0]"),
    ({"stop": ["x", ""]}, "stop[1]"),
    ({"stop": ["x"] * 10_000}, "stop"),
    ({"stop": "x" * 257}, "stop[0]"),
    ({"stop": 5}, "stop"),
    ({"stop": [None]}, "stop[0]"),
    # log-probabilities
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": HUGE}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    # streams
    ({"stream": "yes"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"include_usage": True}, "stream": False}, "stream_options"),
    ({"stream_options": 1, "stream": True}, "stream_options"),
    ({"stream_options": {"usage": True}, "stream": True}, "stream_options.usage"),
    # what is not offered, and what nobody knows
    ({"response_format": {"type": "json_schema"}}, "response_format.type"),
    ({"response_format": {"type": "json_object"}}, "response_format.type"),
    ({"response_format": {"type": "bogus"}}, "response_format.type"),
    ({"response_format": {"type": ["text"]}}, "response_format.type"),
    ({"response_format": {"type": "text", "schema": {}}}, "response_format"),
    ({"response_format": "json"}, "response_format"),
    ({"suffix": "end"}, "suffix"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"temprature": 1}, "temprature"),
    ({"guided_regex": "("}, "guided_regex"),
    ({"echo": 1}, "echo"),
    ({"model": None}, "model"),
    ({"model": 5}, "model"),
]

CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": {"role": "user"}}, "messages"),
    ({"messages": [None]}, "messages[0]"),
    ({"messages": [[]] * 1000}, "messages[0]"),
    ({"messages": [MESSAGE] * 2049}, "messages"),
    ({"messages": [{"content": "Hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": ["Hi"]}]}, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content"),
    ({"messages": [{"role": "robot", "content": "Hi"}]}, "messages[0].role"),
    ({"messages": [MESSAGE, {"role": "tool", "content": "4"}]}, "messages[1]"),
    ({"messages": [{**MESSAGE, "tool_calls": [{"id": "1"}]}]}, "messages[0].tool_calls"),
    ({"messages": [{**MESSAGE, "contents": "Hi"}]}, "messages[0].contents"),
    ({"messages": [{**MESSAGE, **{f"x{i}": 1 for i in range(10_000)}}]}, "messages[0].x0"),
    ({"messages": [{"role": "user", "content": "x" * 600}]}, "messages"),
    ({"logprobs": 1}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    ({"top_logprobs": -1, "logprobs": True}, "top_logprobs"),
    ({"max_completion_tokens": 3}, "max_completion_tokens"),
    ({"prompt": "Hi"}, "prompt"),
    ({"echo": True}, "echo"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": [{}]}, "functions"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"audio": {}}, "audio"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"web_search_options": {}}, "web_search_options"),
]


def _ids(cases: list[tuple[dict[str, Any], str]]) -> list[str]:
    return [ascii(fields)[:40] for fields, _ in cases]


@pytest.mark.parametrize(("fields", "param"), COMPLETIONS, ids=_ids(COMPLETIONS))
def test_completions(served: Served, fields: dict[str, Any], param: str) -> None:
    _assert_refused(served, "/v1/completions", {"prompt": "Hi", "max_tokens": 4} | fields, param)


@pytest.mark.parametrize(("fields", "param"), CHATS, ids=_ids(CHATS))
def test_chats(served: Served, fields: dict[str, Any], param: str) -> None:
    body = {"messages": [MESSAGE], "max_tokens": 4} | fields
    _assert_refused(served, "/v1/chat/completions", body, param)


def _assert_refused(served: Served, path: str, body: dict[str, Any], param: str) -> None:
    """Status 400 with and without ``stream``; the next good request is answered as before."""
    body = {"model": "tiny"} | body
    bodies = [body] if "stream" in body else [body, body | {"stream": True}]
    for each in bodies:
        response = served.http.post(path, json=each)
        assert response.status_code == 400, response.text[:300]
        error = response.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert 10 < len(error["message"]) < 400, error["message"]
        assert "Input should" not in error["message"], "pydantic's own words"
        assert error["param"] == param, error
        assert error["code"], error
    assert served.engine.submitted == []
    good = served.complete(temperature=0)
    assert good.status_code == 200
    assert good.json()["choices"][0]["text"] == "htsn"


JUNK: list[Any] = [True, 1, -1, 1.5, 10**30, -1e300, "", "x", [], [[]], [None], {}, {"x": []}]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_every_field_takes_its_type_alone(served: Served, path: str) -> None:
    """Whatever a field is, the answer is right or a refusal that names it; null is the default."""
    document = served.http.get("/openapi.json").json()
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    fields = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]["properties"]
    required = {"model", "prompt", "messages"}
    good = {"model": "tiny", "max_tokens": 2}
    good |= {"prompt": "Hi"} if "prompt" in fields else {"messages": [MESSAGE]}
    assert len(fields) > 20
    for name in fields:
        nothing = served.http.post(path, json=good | {name: None})
        assert nothing.status_code == (400 if name in required else 200), (name, nothing.text)
        num_refused = 0
        for value in JUNK:
            answer = served.http.post(path, json=good | {name: value})
            if answer.status_code != 200:
                num_refused += 1
                error = answer.json()["error"]
                assert answer.status_code in (400, 404), (name, value, answer.text)
                assert error["param"].startswith(name), (name, error)
                assert "Input" not in error["message"] and "what this" not in error["message"]
        assert num_refused >= 7, name


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"},
        {"safety_identifier": "x", "prompt_cache_key": "y", "parallel_tool_calls": False},
        {"response_format": {"type": "text"}, "tools": None, "tool_choice": "none"},
        {"user": 5, "metadata": {"deep": [[[[]]]]}},
        {"temperature": None, "top_p": None, "n": None, "stop": None, "seed": None},
        {"logit_bias": None, "logprobs": None, "max_tokens": None, "stream_options": None},
        {"logit_bias": {}, "stop": [], "stop_token_ids": []},
        {"seed": 2**63 - 1, "temperature": 2, "top_p": 1, "top_k": 0, "min_p": 0},
        {"top_p": 0},
    ],
)
def test_what_changes_nothing_is_taken(
    served: Served, fields: dict[str, Any], stream: bool
) -> None:
    assert served.complete(**fields, stream=stream).status_code == 200
    assert served.chat(**fields, stream=stream).status_code == 200


def test_an_unknown_field_is_answered_with_the_nearest(served: Served) -> None:
    message = served.complete(temprature=1).json()["error"]["message"]
    assert message == "temprature: no such field. Did you mean temperature."


SAMPLING: dict[str, Any] = {
    "max_tokens": 7,
    "min_tokens": 2,
    "n": 2,
    "temperature": 0.5,
    "top_k": 3,
    "top_p": 0.5,
    "min_p": 0.25,
    "repetition_penalty": 1.5,
    "presence_penalty": 1.25,
    "frequency_penalty": 1.75,
    "logit_bias": {"66": -1.5, "65": 1.5},
    "seed": 5,
    "stop": ["é"],
    "stop_token_ids": [7],
    "ignore_eos": True,
    "logprobs": 1,
    "priority": 3,
}
"""One value for each parameter, none of them the default."""


def test_every_sampling_parameter_reaches_the_engine_on_both_routes(served: Served) -> None:
    assert served.complete(**SAMPLING).status_code == 200
    assert served.chat(**SAMPLING | {"logprobs": True, "top_logprobs": 1}).status_code == 200
    # A completion asks for the prompt's log-probabilities by echo.
    wanted = {field.name for field in dataclasses.fields(SamplingParams)} - {"prompt_logprobs"}
    for request in served.engine.requests[-2:]:
        got = {name: getattr(request.params, name) for name in wanted}
        assert got == SAMPLING | {
            "logit_bias": ((65, 1.5), (66, -1.5)),
            "stop": ("é",),
            "stop_token_ids": (7,),
        }


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 2.0}, "n = 2.0: it is not a whole number. Send one without a fraction or exponent."),
        ({"top_p": 1.1}, "top_p = 1.1: it is out of range. Send a number that is at most 1.0."),
        ({"stream": "yes"}, "stream = 'yes': it is not a truth value. Send true or false."),
        ({"stop": [""]}, "stop[0] = '': it is empty. Send text."),
        ({"n": 2.0, "seed": "1"}, "n = 2.0: it is not a whole number. Send one without a fraction "
         "or exponent. Others are wrong as well: 1."),
    ],
)  # fmt: skip
def test_a_refusal_says_field_value_problem_and_remedy(
    served: Served, fields: dict[str, Any], message: str
) -> None:
    assert served.complete(**fields).json()["error"]["message"] == message


def test_another_model_is_not_found(served: Served) -> None:
    for response in (served.complete(model="other"), served.chat(model="", stream=True)):
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "model_not_found"


def test_the_prompt_fills_the_context_up_to_one_token(served: Served) -> None:
    assert served.complete(prompt=[65] * 511).json()["usage"]["completion_tokens"] == 1
    refused = served.complete(prompt=PROMPT_512).json()["error"]
    assert refused["code"] == "context_length_exceeded"
    scored = served.complete(prompt=PROMPT_512, max_tokens=0, echo=True, logprobs=0).json()
    assert len(scored["choices"][0]["logprobs"]["tokens"]) == 512


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_the_prompt_fills_a_pool_that_is_smaller_than_the_context(max_tokens: int) -> None:
    limits = Limits(vocab_size=257, context_length=512, num_blocks=16, block_size=4)
    with serve(engine=FakeEngine(limits=limits)) as served:
        # The last token of an answer needs no room in the pool.
        fields: dict[str, Any] = {"max_tokens": max_tokens, "echo": True}
        assert served.complete(prompt=[65] * 64, **fields).status_code == 200
        refused = served.complete(prompt=[65] * 65, **fields).json()["error"]
        assert (refused["code"], refused["param"]) == ("context_length_exceeded", "prompt")
        assert "has 64. Shorten it." in refused["message"]


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_an_answer_that_outgrows_the_pool_is_refused_by_the_field_that_was_sent(field: str) -> None:
    limits = Limits(vocab_size=257, context_length=512, num_blocks=16, block_size=4)
    with serve(engine=FakeEngine(limits=limits)) as served:
        body = {"model": "tiny", "messages": [MESSAGE], field: 400}
        error = served.http.post("/v1/chat/completions", json=body).json()["error"]
        assert error["param"] == field and error["message"].startswith(f"{field} = 400: ")


@pytest.mark.parametrize("fields", [{}, {"logprobs": 1}, {"stream": True}], ids=str)
def test_tokens_that_only_the_model_has_are_echoed_without_text(fields: dict[str, Any]) -> None:
    """Vocabularies of models are padded beyond those of their tokenizers."""
    limits = Limits(vocab_size=300, context_length=512, num_blocks=256, block_size=4)
    with serve(engine=FakeEngine(limits=limits)) as served:
        answer = served.complete(prompt=[65, 299, 66], max_tokens=0, echo=True, **fields)
        assert answer.status_code == 200 and '"text":"AB"' in answer.text, answer.text


def test_a_huge_answer_is_cut_at_the_context(served: Served) -> None:
    usage = served.complete(prompt=[65] * 500, max_tokens=HUGE).json()["usage"]
    assert usage["completion_tokens"] == 12


def test_empty_content_is_a_chat(served: Served) -> None:
    assert served.chat(messages=[{"role": "user", "content": ""}]).status_code == 200


def test_parts_of_text_stand_on_lines(served: Served) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    served.chat(messages=[{"role": "developer", "content": parts}])
    prompt = bytes(token for token in served.engine.requests[-1].prompt if token < 256)
    assert prompt.decode() == "<|system|>\none\ntwo\n<|assistant|>\n"
