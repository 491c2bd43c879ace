"""Server-sent events as the official client reads them, written to one client.

Every event is one line ``data: JSON`` and an empty line; a line ``id:`` is before them where the
stream can go on after a break (see ``event_ids``). The JSON is ASCII: clients that split text at
every line separator of Unicode would tear it apart otherwise. The last event of an answer is
``data: [DONE]``; one that failed ends with an error object and without that line.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One event of a stream."""

    content: dict[str, Any]

    id: str | None = None
    """With what the stream goes on after this event; None where it cannot."""


class EventStream:
    """One response: ``start``, then events, then ``end`` or ``fail``."""

    def __init__(
        self, send: Send, request_id: str, *, write_timeout_s: float, keep_alive_s: float
    ) -> None:
        """A write that takes ``write_timeout_s`` fails; silence lasts ``keep_alive_s`` at most, as
        far as ``events`` is called."""
        self._send = send
        self._request_id = request_id
        self._write_timeout_s = write_timeout_s
        self._keep_alive_s = keep_alive_s
        self._last_write = 0.0

    async def start(self) -> None:
        """Send status 200 and the headers; from here on a failure is an event."""
        headers = [*_HEADERS, (b"x-request-id", self._request_id.encode())]
        self._last_write = time.monotonic()
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def events(self, events: Sequence[Event]) -> None:
        """Send ``events`` in one piece; where there are none and were none for long, a comment."""
        if events:
            await self._write("".join(map(_text, events)))
        elif time.monotonic() - self._last_write > self._keep_alive_s:
            await self.comment()

    async def comment(self) -> None:
        """Send a line that clients pass over: it shows proxies that the stream is alive.

        No empty line follows: for the official client that would end an event, once one had an id.
        """
        await self._write(": waiting\n")

    async def end(self) -> None:
        """Send the end of a complete answer."""
        await self._write("data: [DONE]\n\n", is_last=True)

    async def fail(self, error: ApiError) -> None:
        """Send the end of an answer that stays incomplete, unless the client reads nothing."""
        self._write_timeout_s = min(self._write_timeout_s, _LAST_WORD_S)
        with contextlib.suppress(SlowReader):
            await self._write(_text(Event(content=error.as_object())), is_last=True)

    async def _write(self, text: str, *, is_last: bool = False) -> None:
        """Send ``text``; SlowReader if the client takes nothing for too long."""
        message = {"type": "http.response.body", "body": text.encode(), "more_body": not is_last}
        try:
            async with asyncio.timeout(self._write_timeout_s):
                await self._send(message)
            self._last_write = time.monotonic()
        except TimeoutError:
            problem = f"The client has read nothing for {self._write_timeout_s:g} seconds."
            raise SlowReader(problem) from None


def _text(event: Event) -> str:
    head = "" if event.id is None else f"id: {event.id}\n"
    return f"{head}data: {json.dumps(event.content, separators=(',', ':'))}\n\n"
