"""The official client works unchanged, streaming and not."""

from __future__ import annotations

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessageParam

from shoal.config import AuthSettings, LimitSettings, ServeSettings
from tests.deployments.fake_engine import spelling
from tests.deployments.server import Served, serve

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hi"}]


def test_models(served: Served) -> None:
    client = served.sdk()
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").object == "model"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_chat(served: Served) -> None:
    served.engine.next_token = spelling("Paris", ends=True)
    answer = served.sdk().chat.completions.create(model="tiny", messages=MESSAGES)
    # The client builds its types without checking; checked, the same object still passes.
    ChatCompletion.model_validate_json(answer.to_json(), strict=True)
    assert answer.choices[0].message.content == "Paris"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6  # five letters and end-of-text
    assert answer.system_fingerprint == "fp1"


@pytest.mark.parametrize("fingerprint", ["fp2", None])
def test_the_fingerprint_is_of_the_engine_that_answers(
    served: Served, fingerprint: str | None
) -> None:
    served.engine.fingerprint = fingerprint
    whole = served.sdk().chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=2)
    stream = served.sdk().completions.create(model="tiny", prompt="Hi", max_tokens=2, stream=True)
    found = {whole.system_fingerprint, *(chunk.system_fingerprint for chunk in stream)}
    assert found == {fingerprint}


def test_a_chat_goes_on_with_what_was_answered(served: Served) -> None:
    client = served.sdk()
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=4)
    message = answer.choices[0].message
    history = [*MESSAGES, message.model_dump(), {"role": "user", "content": "And?"}]
    client.chat.completions.create(model="tiny", messages=history, max_tokens=4)  # type: ignore[arg-type]
    prompt = bytes(token for token in served.engine.requests[-1].prompt if token < 256)
    assert f"<|assistant|>\n{message.content}" in prompt.decode()


def test_chat_stream(served: Served) -> None:
    served.engine.next_token = spelling("Paris", ends=True)
    stream = served.sdk().chat.completions.create(
        model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    for chunk in chunks:
        ChatCompletionChunk.model_validate_json(chunk.to_json(), strict=True)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].delta.role for c in chunks[1:-1]] == [None] * (len(chunks) - 2)
    text = "".join(c.choices[0].delta.content or "" for c in chunks[:-1])
    assert text == "Paris"
    reasons = [c.choices[0].finish_reason for c in chunks[:-1]]
    assert reasons == [None] * (len(reasons) - 1) + ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 6
    assert {chunk.usage for chunk in chunks[:-1]} == {None}
    assert len({(chunk.id, chunk.created) for chunk in chunks}) == 1


def test_the_sdk_assembles_a_stream(served: Served) -> None:
    served.engine.next_token = spelling("Paris", ends=True)
    with served.sdk().chat.completions.stream(model="tiny", messages=MESSAGES, n=2) as stream:
        stream.until_done()
        answer = stream.get_final_completion()
    assert [choice.message.content for choice in answer.choices] == ["Paris", "Paris"]


def test_chat_logprobs(served: Served) -> None:
    served.engine.next_token = spelling("né", ends=True)
    client = served.sdk()
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    # The two bytes of é make one piece; end-of-text has none, and no bytes either.
    assert [entry.token for entry in logprobs.content] == ["n", "", "é", ""]
    assert [entry.bytes for entry in logprobs.content] == [[110], [0xC3], [0xA9], None]
    assert [len(entry.top_logprobs) for entry in logprobs.content] == [2, 2, 2, 2]
    alone = client.chat.completions.create(model="tiny", messages=MESSAGES, logprobs=True)
    logprobs = alone.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert [entry.logprob for entry in logprobs.content] == [-0.25] * 4
    assert logprobs.content[0].top_logprobs == []


@pytest.mark.parametrize("stream", [False, True])
def test_completions(served: Served, stream: bool) -> None:
    served.engine.next_token = spelling("abcdef")
    given = served.sdk().completions.create(
        model="tiny", prompt=["x", "y"], n=2, max_tokens=3, stream=stream
    )
    pieces = [given] if isinstance(given, Completion) else list(given)
    texts = dict.fromkeys(range(4), "")
    for piece in pieces:
        for choice in piece.choices:
            texts[choice.index] += choice.text
    assert texts == dict.fromkeys(range(4), "abc")


def test_errors_are_the_clients_exceptions(served: Served) -> None:
    client = served.sdk()
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="tiny", prompt="x", temperature=3)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")


def test_a_failing_stream_raises(served: Served) -> None:
    served.engine.failure = "the step failed"
    stream = served.sdk().completions.create(model="tiny", prompt="x", stream=True)
    with pytest.raises(openai.APIError, match="the step failed"):
        list(stream)


def test_keep_alive_comments_are_passed_over() -> None:

    settings = ServeSettings(limits=LimitSettings(keep_alive_s=0.01))
    with serve(settings) as served:
        served.engine.step_s = 0.05
        response = served.chat(stream=True)
        assert ": waiting\n" in response.text
        stream = served.sdk().chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=3, stream=True
        )
        assert len("".join(chunk.choices[0].delta.content or "" for chunk in stream)) == 3


def test_api_keys(tmp_path_factory: pytest.TempPathFactory) -> None:

    keys = tmp_path_factory.mktemp("keys") / "keys.txt"
    keys.write_text("# team\nsecret-1\n\nsecret-2\n")
    with serve(ServeSettings(auth=AuthSettings(keys_file=str(keys)))) as served:
        with pytest.raises(openai.AuthenticationError) as refused:
            served.sdk(api_key="secret-3").models.list()
        assert refused.value.code == "invalid_api_key"
        assert [model.id for model in served.sdk(api_key="secret-2").models.list()] == ["tiny"]
        assert served.http.get("/health").status_code == 200
        without = served.http.get("/v1/models")
        assert without.status_code == 401
        assert without.headers["www-authenticate"] == "Bearer"
        assert served.http.get("/stats").status_code == 401
        basic = served.http.get("/stats", headers={"Authorization": "Basic secret-1"})
        assert basic.status_code == 401
