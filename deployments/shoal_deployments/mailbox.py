"""Outputs on their way to one client: the engines never wait, a slow reader gets more at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from shoal.errors import ShoalError, WorkError
from shoal.inference.protocol import Output


class SlowReader(WorkError):
    """The client takes less than the engines give, and the bound on what waits is reached."""


class Mailbox:
    """A queue between the engines and the answer to one client, all on one event loop.

    ``put`` takes what a step gave and returns at once; ``take`` gives all that has come since the
    last time, so a client that reads slowly gets larger pieces. Beyond ``capacity`` unread tokens
    the rest is dropped and ``take`` raises: whoever reads then aborts the requests.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._outputs: list[Output] = []
        self._num_unread = 0
        self._error: ShoalError | None = None
        self._is_closed = False
        self._arrived = asyncio.Event()

    def put(self, outputs: Sequence[Output]) -> None:
        """Add ``outputs``; of no effect after the end."""
        if not outputs or self._is_closed or self._error is not None:
            return
        self._outputs.extend(outputs)
        self._num_unread += sum(len(output.token_ids) for output in outputs)
        if self._num_unread > self._capacity:
            self._outputs.clear()
            self.fail(SlowReader(f"More than {self._capacity} tokens wait for a slow reader."))
        self._arrived.set()

    def fail(self, error: ShoalError) -> None:
        """End with ``error``, which is raised once what came before it has been taken."""
        if self._error is None:
            self._error = error
        self._arrived.set()

    def close(self) -> None:
        """Take nothing more: the client has its answer, or has left."""
        self._is_closed = True
        self._outputs.clear()

    async def take(self) -> list[Output]:
        """All that is unread, at least one output; waits for it.

        Raises:
            ShoalError: what ``fail`` was given.
        """
        await self._arrived.wait()
        if not self._outputs:
            assert self._error is not None
            raise self._error
        taken, self._outputs = self._outputs, []
        self._num_unread = 0
        if self._error is None:
            self._arrived.clear()
        return taken
