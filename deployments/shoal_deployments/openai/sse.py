"""Server-sent events as the official client reads them, written to one client.

Every event is one line ``data: JSON`` and an empty line. The JSON is ASCII: clients that split
text at every line separator of Unicode would tear it apart otherwise. The last event of an answer
is ``data: [DONE]``; one that failed ends with an error object and without that line.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Sequence
from typing import Any

from starlette.types import Send

from shoal_deployments.mailbox import SlowReader
from shoal_deployments.openai.errors import ApiError

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Proxies of the nginx family would hold events back.
    (b"x-accel-buffering", b"no"),
]

_LAST_WORD_S = 1.0
"""How long a client that may not read at all is waited for."""


class EventStream:
    """One response: ``start``, then events, then ``end`` or ``fail``."""

    def __init__(self, send: Send, request_id: str, write_timeout_s: float) -> None:
        self._send = send
        self._request_id = request_id
        self._write_timeout_s = write_timeout_s
        self.has_started = False

    async def start(self) -> None:
        """Send status 200 and the headers; from here on a failure is an event."""
        headers = [*_HEADERS, (b"x-request-id", self._request_id.encode())]
        self.has_started = True
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def events(self, objects: Sequence[dict[str, Any]]) -> None:
        """Send one event for each of ``objects``, in one piece."""
        if objects:
            await self._write("".join(_event(content) for content in objects))

    async def comment(self) -> None:
        """Send a line that clients pass over: it shows proxies that the stream is alive."""
        await self._write(": waiting\n\n")

    async def end(self) -> None:
        """Send the end of a complete answer."""
        await self._write("data: [DONE]\n\n", is_last=True)

    async def fail(self, error: ApiError) -> None:
        """Send the end of an answer that stays incomplete, unless the client reads nothing."""
        self._write_timeout_s = min(self._write_timeout_s, _LAST_WORD_S)
        with contextlib.suppress(SlowReader):
            await self._write(_event(error.as_object()), is_last=True)

    async def _write(self, text: str, *, is_last: bool = False) -> None:
        """Send ``text``; SlowReader if the client takes nothing for too long."""
        message = {"type": "http.response.body", "body": text.encode(), "more_body": not is_last}
        try:
            async with asyncio.timeout(self._write_timeout_s):
                await self._send(message)
        except TimeoutError:
            problem = f"The client has read nothing for {self._write_timeout_s:g} seconds."
            raise SlowReader(problem) from None


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, separators=(',', ':'))}\n\n"
