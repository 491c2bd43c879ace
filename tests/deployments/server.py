"""The application behind a real uvicorn on a loopback port, and clients of several kinds."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import httpx2
import openai
import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp

from shoal.config import ServeSettings
from shoal_deployments.http_app import build_http_app
from tests.deployments.fake_engine import FakeEngine

T = TypeVar("T")

DEADLINE_S = 20.0


class Served:
    """A running server: its engine, its address, and what its event loop is at."""

    def __init__(
        self, app: FastAPI, engine: FakeEngine, port: int, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.app = app
        self.engine = engine
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self._loop = loop
        self._clients: list[openai.OpenAI] = []
        self.http = httpx2.Client(base_url=self.url, timeout=DEADLINE_S)

    def sdk(self, api_key: str = "none") -> openai.OpenAI:
        """The official client, without its own retries."""
        client = openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=DEADLINE_S
        )
        self._clients.append(client)
        return client

    def close(self) -> None:
        """Close all clients."""
        self.http.close()
        for client in self._clients:
            client.close()

    def complete(self, **fields: Any) -> httpx2.Response:
        """POST a small completion with ``fields`` on top."""
        body = {"model": "tiny", "prompt": "Hi", "max_tokens": 4} | fields
        return self.http.post("/v1/completions", json=body)

    def chat(self, **fields: Any) -> httpx2.Response:
        """POST a small chat with ``fields`` on top."""
        messages = [{"role": "user", "content": "Hi"}]
        body = {"model": "tiny", "messages": messages, "max_tokens": 4} | fields
        return self.http.post("/v1/chat/completions", json=body)

    def connect(self) -> socket.socket:
        """A raw connection."""
        return socket.create_connection(("127.0.0.1", self.port), DEADLINE_S)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` on the server's event loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(DEADLINE_S)

    def tasks(self) -> set[str]:
        """Names of the tasks that the server's loop has beside its own."""
        return self.run(_task_names())

    def wait_until(self, holds: Callable[[], bool], within_s: float = 5.0) -> None:
        """Wait for ``holds()``; AssertionError after ``within_s``."""
        deadline = time.monotonic() + within_s
        while not holds():
            assert time.monotonic() < deadline, "it did not come to hold"
            time.sleep(0.005)

    def assert_idle(self, within_s: float = 2.0) -> None:
        """Assert that nothing is left of any request: no choice, no task, no count."""
        self.wait_until(lambda: self.engine.num_running == 0, within_s)
        self.wait_until(lambda: not self.tasks(), within_s)
        assert self.http.get("/stats").json()["held"] == 0


async def _task_names() -> set[str]:
    return {
        f"{task.get_name()}: {task.get_coro()}"
        for task in asyncio.all_tasks()
        if task is not asyncio.current_task()
        and task.get_name() not in ("fake engine", "server", "lifespan")
        and "LifespanOn.main" not in str(task.get_coro())
    }


@contextmanager
def serve(
    settings: ServeSettings | None = None,
    engine: FakeEngine | None = None,
    wrap: Callable[[FastAPI], ASGIApp] = lambda app: app,
) -> Iterator[Served]:
    """Serve ``engine`` until the end of the block; ``wrap`` puts the application into another."""
    engine = engine or FakeEngine()
    app = build_http_app(engine, engine.tokenizer, settings or ServeSettings())
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(wrap(app), log_config=None, timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    loops: list[asyncio.AbstractEventLoop] = []

    async def main() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.set_name("server")
        loops.append(asyncio.get_running_loop())
        await server.serve([listener])

    thread = threading.Thread(target=_run, args=(config, main))
    thread.start()
    deadline = time.monotonic() + DEADLINE_S
    while not server.started:
        assert time.monotonic() < deadline and thread.is_alive(), "the server did not start"
        time.sleep(0.01)
    served = Served(app, engine, listener.getsockname()[1], loops[0])
    try:
        yield served
    finally:
        served.close()
        server.should_exit = True
        thread.join(DEADLINE_S)
        assert not thread.is_alive(), "the server did not stop"


def _run(config: uvicorn.Config, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(main())


def events(response: httpx2.Response) -> list[Any]:
    """What each event of a complete stream holds; ``"[DONE]"`` as text, the rest parsed."""
    return [content for _, content in events_with_ids(response.text)]


def events_with_ids(text: str) -> list[tuple[str | None, Any]]:
    """Each event of a complete stream and its id, if it has one."""
    blocks = text.split("\n\n")
    assert blocks.pop() == "", "the last event is not closed by an empty line"
    found = []
    for block in blocks:
        *heads, data = (line for line in block.split("\n") if not line.startswith(":"))
        entry = data.removeprefix("data: ")
        ids = [head.removeprefix("id: ") for head in heads]
        content = entry if entry == "[DONE]" else json.loads(entry)
        found.append((ids[0] if ids else None, content))
    return found
