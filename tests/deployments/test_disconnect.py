"""A client that leaves, whenever and however, frees what it held."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import socket
import struct
from collections.abc import Iterator
from typing import Any

import pytest
from ray.exceptions import ActorDiedError
from starlette.types import Message

from shoal.inference import Limits
from shoal_deployments.disconnects import Disconnects
from shoal_deployments.tokenizing import INLINE_CHARACTERS
from tests.deployments.fake_engine import FakeEngine
from tests.deployments.gated_tokenizer import GatedTokenizer
from tests.deployments.server import DEADLINE_S, Served, serve

LONG = 10**6
"""Tokens that no client here waits for."""

SHAPES: list[dict[str, Any]] = [
    {"stream": stream, "n": n, "prompt": prompt}
    for stream in (False, True)
    for n in (1, 4)
    for prompt in ("x", ["x", "y", "z"])
]


@pytest.fixture(scope="module")
def busy_server() -> Iterator[Served]:
    """A server whose engine has room for few choices and endless answers."""
    limits = Limits(
        vocab_size=257,
        context_length=10**7,
        num_blocks=10**7,
        block_size=1,
        max_running=16,
        max_waiting=10**4,
    )
    with serve(engine=FakeEngine(limits=limits)) as served:
        served.engine.step_s = 0.002
        yield served


@pytest.fixture
def busy(busy_server: Served, caplog: pytest.LogCaptureFixture) -> Iterator[Served]:
    """That server; at the end nothing runs and nothing was logged but the requests."""
    busy_server.engine.aborted.clear()
    busy_server.engine.submitted.clear()
    busy_server.engine.submit_s = 0.0
    with caplog.at_level(logging.INFO):
        yield busy_server
        busy_server.assert_idle()
    loud = [record for record in caplog.records if record.levelno > logging.INFO]
    assert not loud, [record.getMessage() for record in loud]


def _request(path: str = "/v1/completions", **fields: Any) -> bytes:
    body: dict[str, Any] = {"model": "tiny", "max_tokens": LONG}
    if path == "/v1/completions":
        body["prompt"] = "x"
    else:
        body["messages"] = [{"role": "user", "content": "x"}]
    content = json.dumps(body | fields).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def _scope() -> dict[str, Any]:
    """The head of such a request, as ASGI has it."""
    return {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "headers": [(b"content-type", b"application/json")],
        "query_string": b"",
    }


def _reset(connection: socket.socket) -> None:
    """Close with a reset, as a killed client's machine does."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def _assert_left(served: Served, caplog: pytest.LogCaptureFixture, count: int = 1) -> None:
    """All that was submitted was aborted, each id once, and the log says 499."""
    served.wait_until(lambda: served.engine.num_running == 0, 2.0)
    served.assert_idle()
    assert sorted(served.engine.aborted) == sorted(served.engine.submitted)
    lines = [record.getMessage() for record in caplog.records if "POST" in record.getMessage()]
    assert sum(" 499 " in line for line in lines) == count


@pytest.mark.parametrize("how", ["close", "reset", "half close"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_while_decoding(
    busy: Served, caplog: pytest.LogCaptureFixture, shape: dict[str, Any], how: str
) -> None:
    connection = busy.connect()
    connection.sendall(_request(**shape))
    num_choices = shape["n"] * (1 if shape["prompt"] == "x" else 3)
    busy.wait_until(lambda: busy.engine.num_running == num_choices)
    if how == "reset":
        _reset(connection)
    elif how == "half close":
        connection.shutdown(socket.SHUT_WR)
    else:
        connection.close()
    _assert_left(busy, caplog)
    connection.close()


def test_while_queued(busy: Served, caplog: pytest.LogCaptureFixture) -> None:
    first, second = busy.connect(), busy.connect()
    first.sendall(_request(n=16, stream=True))
    busy.wait_until(lambda: busy.engine.num_running == 16)
    second.sendall(_request(n=4))
    busy.wait_until(lambda: busy.engine.num_running == 20)
    second.close()
    busy.wait_until(lambda: busy.engine.num_running == 16, 2.0)
    first.close()
    _assert_left(busy, caplog, 2)


def test_while_being_submitted(busy: Served, caplog: pytest.LogCaptureFixture) -> None:
    busy.engine.submit_s = 0.3
    before = busy.engine.num_asked
    with busy.connect() as connection:
        connection.sendall(_request(path="/v1/chat/completions"))
        busy.wait_until(lambda: busy.engine.num_asked > before)
    busy.wait_until(lambda: len(busy.engine.aborted) == 1)
    busy.wait_until(lambda: not busy.tasks())
    assert busy.engine.num_running == 0


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_while_tokenizing(caplog: pytest.LogCaptureFixture, path: str) -> None:
    """Who waits for the tokenizer is gone at once, and what it has not begun it never does."""

    def request(letter: str) -> bytes:
        text = letter * (INLINE_CHARACTERS + 1)
        if "chat" in path:
            return _request(path, messages=[{"role": "user", "content": text}])
        return _request(path, prompt=text)

    tokenizer = GatedTokenizer()
    with serve(engine=FakeEngine(tokenizer)) as served, caplog.at_level(logging.INFO):
        try:
            with served.connect() as first, served.connect() as second:
                first.sendall(request("x"))
                assert tokenizer.has_begun.wait(DEADLINE_S)
                second.sendall(request("y"))
                served.wait_until(lambda: served.http.get("/stats").json()["held"] == 2)
            _assert_left(served, caplog, 2)
        finally:
            tokenizer.may_go_on.set()
        assert served.complete().status_code == 200
        assert [text[0] for text in tokenizer.begun] == ["x"]
        assert served.engine.num_asked == 1


@pytest.mark.parametrize("num_bytes", [20, 120])
def test_in_the_middle_of_the_request(busy: Served, num_bytes: int) -> None:
    with busy.connect() as connection:
        connection.sendall(_request()[:num_bytes])
    busy.assert_idle()
    assert busy.engine.submitted == []


def test_at_random_moments(busy: Served) -> None:
    """Bursts of clients of every kind that leave within 300 ms, some of them at once."""
    draw = random.Random(0)

    async def client() -> None:
        path = draw.choice(["/v1/completions", "/v1/chat/completions"])
        shape: dict[str, Any] = {"stream": draw.random() < 0.5, "n": draw.choice([1, 4])}
        if path == "/v1/completions" and draw.random() < 0.3:
            shape["prompt"] = ["x", "y"]
        moment, stays = draw.random() * 0.3, draw.random() * 0.3
        await asyncio.sleep(moment)
        reader, writer = await asyncio.open_connection("127.0.0.1", busy.port)
        writer.write(_request(path, **shape))
        if draw.random() < 0.8:
            await writer.drain()
            await asyncio.sleep(draw.choice([0, stays]))
        if draw.random() < 0.5:
            writer.transport.abort()
        writer.close()

    async def burst() -> None:
        await asyncio.gather(*(client() for _ in range(200)))

    asyncio.run(burst())
    busy.assert_idle(within_s=2.0)
    assert len(busy.engine.submitted) > 50
    assert set(busy.engine.submitted) <= set(busy.engine.aborted)
    assert busy.http.get("/stats").json()["replicas"][0]["kv_blocks_free"] == 256
    assert busy.complete(max_tokens=2).status_code == 200


def test_a_proxy_that_is_lost_is_a_client_that_left(
    busy: Served, caplog: pytest.LogCaptureFixture
) -> None:
    """What Ray Serve's receive raises when the call to the proxy ends."""
    content = json.dumps({"model": "tiny", "prompt": "x", "max_tokens": LONG}).encode()
    messages: list[Message] = [{"type": "http.request", "body": content}]
    sent: list[Message] = []

    async def receive() -> Message:
        if messages:
            return messages.pop()
        for _ in range(2000):
            await asyncio.sleep(0.001)
            if busy.engine.num_running:
                break
        raise ActorDiedError

    async def send(message: Message) -> None:
        sent.append(message)

    busy.run(Disconnects(busy.app)(_scope(), receive, send))
    _assert_left(busy, caplog)


def test_a_cancelled_request_is_aborted(busy: Served, caplog: pytest.LogCaptureFixture) -> None:
    """Ray Serve cancels the request's task rather than say that the client left."""
    content = json.dumps({"model": "tiny", "prompt": "x", "max_tokens": LONG}).encode()
    messages: list[Message] = [{"type": "http.request", "body": content}]

    async def receive() -> Message:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop()

    async def send(message: Message) -> None:
        raise AssertionError("nothing can be said yet")

    async def scene() -> None:
        task = asyncio.create_task(busy.app(_scope(), receive, send))
        for _ in range(2000):
            await asyncio.sleep(0.001)
            if busy.engine.num_running:
                break
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    busy.run(scene())
    _assert_left(busy, caplog)
