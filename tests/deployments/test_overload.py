"""Full queues, lost engines, failing steps and clients that do not read."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import islice
from typing import Any

import httpx2
import pytest

from shoal.config import LimitSettings, ServeSettings
from shoal.errors import WorkError
from shoal.inference import Limits
from shoal_deployments.engine_client import EngineUnavailable
from tests.deployments.fake_engine import FakeEngine
from tests.deployments.server import DEADLINE_S, Served, events, serve


def _burst(
    served: Served, count: int, num_taken: int, **fields: Any
) -> tuple[list[httpx2.Response], list[httpx2.Response]]:
    """Answers that came while the engine stood still, all but ``num_taken``, and the others."""
    served.engine.step_s = 0.01
    served.engine.is_stalled = True
    with ThreadPoolExecutor(count) as threads:
        asked = [threads.submit(served.complete, **fields) for _ in range(count)]
        try:
            early = set(islice(as_completed(asked, DEADLINE_S), count - num_taken))
        finally:
            served.engine.is_stalled = False
        late = [each for each in asked if each not in early]
        return [each.result() for each in early], [each.result() for each in late]


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_frontend_answers_429_at_once(stream: bool) -> None:
    with serve(ServeSettings(limits=LimitSettings(requests=5, retry_after_s=7))) as served:
        refused, taken = _burst(served, 30, 5, stream=stream, max_tokens=8)
        assert [answer.status_code for answer in taken] == [200] * 5
        for answer in refused:
            assert answer.status_code == 429
            assert answer.headers["retry-after"] == "7"
            assert answer.json()["error"]["code"] == "too_many_requests"
            assert answer.json()["error"]["type"] == "rate_limit_error"
        served.assert_idle()
        assert served.complete().status_code == 200


def test_a_full_queue_answers_429() -> None:
    limits = Limits(
        vocab_size=257,
        context_length=512,
        num_blocks=256,
        block_size=4,
        max_running=2,
        max_waiting=3,
    )
    with serve(engine=FakeEngine(limits=limits)) as served:
        refused, taken = _burst(served, 20, 5, max_tokens=8)
        assert [answer.status_code for answer in refused] == [429] * 15
        assert [answer.status_code for answer in taken] == [200] * 5
        assert served.engine.aborted == [], "what was not taken needs no abort"
        # More than ever fit, whichever way they are asked for.
        assert served.complete(n=4, stream=True).status_code == 400
        assert served.complete(prompt=["a", "b"], n=2).status_code == 400
        answer = served.complete(prompt=["a"] * 4)
        assert answer.status_code == 400 and "Send fewer prompts, at most 3" in answer.text
        assert served.complete(prompt=["a"] * 3).status_code == 200
        served.assert_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_no_engine_answers_503(served: Served, stream: bool) -> None:
    served.engine.refusal = EngineUnavailable("All engines are starting.")
    for post in (served.complete, served.chat):
        answer = post(stream=stream)
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        assert answer.json()["error"] == {
            "message": "All engines are starting.",
            "type": "server_error",
            "param": None,
            "code": "engine_unavailable",
        }
    served.engine.refusal = None
    assert served.complete().status_code == 200


@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        ("out of memory in the step", 500, "engine_failed"),
        (EngineUnavailable("The engine is lost."), 503, "engine_unavailable"),
        (WorkError("The journal is full."), 500, "engine_failed"),
    ],
)
def test_a_failing_step(served: Served, failure: Any, status: int, code: str) -> None:
    served.engine.failure = failure
    answer = served.complete(prompt=["a", "b"], n=2)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    served.engine.step_s = 0.01
    body = {"model": "tiny", "prompt": ["a", "b"], "n": 2, "stream": True, "max_tokens": 400}
    with served.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        first = next(lines)
        served.engine.failure = failure
        got = [line.removeprefix("data: ") for line in (first, *lines) if line.startswith("data: ")]
    assert response.status_code == 200
    assert json.loads(got[-1])["error"]["code"] == code
    assert "[DONE]" not in got and not any("error" in json.loads(line) for line in got[:-1])
    served.wait_until(lambda: served.engine.num_running == 0)
    assert served.complete().status_code == 200


def test_a_client_that_does_not_read_is_ended() -> None:
    limits = LimitSettings(unread_tokens=50, write_timeout_s=0.5)
    engine = FakeEngine(
        limits=Limits(vocab_size=257, context_length=10**7, num_blocks=10**7, block_size=1)
    )
    body = {"model": "tiny", "prompt": "x", "stream": True, "n": 32, "max_tokens": 10**6}
    content = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    ).encode()
    with serve(ServeSettings(limits=limits), engine) as served, served.connect() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # soon full
        connection.sendall(head + content)
        served.wait_until(lambda: engine.num_running == 32)
        # Without a reader, the socket's buffers fill and then the server's own bound is met.
        served.wait_until(lambda: engine.num_running == 0, within_s=15)
        assert engine.aborted == engine.submitted
        assert served.complete(max_tokens=2).status_code == 200
        served.wait_until(lambda: not served.tasks(), within_s=5)


def test_the_engine_does_not_wait_for_a_slow_reader(served: Served) -> None:
    body = {"model": "tiny", "prompt": "x", "stream": True, "max_tokens": 400}
    with served.http.stream("POST", "/v1/completions", json=body) as response:
        served.wait_until(lambda: served.engine.num_running == 0)
        response.read()
    texts = [event["choices"][0]["text"] for event in events(response)[:-1]]
    assert len("".join(texts)) == 400


def test_an_engine_that_stands_still_fails_the_probe(served: Served) -> None:
    assert served.http.get("/health").json()["status"] == "ok"
    served.engine.is_stalled = True
    answer = served.http.get("/health")
    assert answer.status_code == 503
    assert answer.json()["status"] == "failing"
    assert "retry-after" in answer.headers
