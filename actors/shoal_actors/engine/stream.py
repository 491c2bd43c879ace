"""Outputs on their way from the engine's thread to one frontend."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from shoal.inference.protocol import Output


class OutputStream:
    """Filled by the engine's thread, emptied on the actor's event loop.

    A frontend that is slow to take its lists gets several steps in one.
    """

    def __init__(self) -> None:
        """Call on the event loop."""
        self._event_loop = asyncio.get_running_loop()
        self._outputs: list[Output] = []
        self._arrived = asyncio.Event()
        self._has_ended = False

    def put(self, outputs: Sequence[Output]) -> None:
        """Add what a step gave; called in any thread, returns at once."""
        self._event_loop.call_soon_threadsafe(self._put, outputs)

    def end(self) -> None:
        """Nothing more comes; called in any thread."""
        self._event_loop.call_soon_threadsafe(self._end)

    async def take(self) -> list[Output]:
        """All that has come since the last time; waits for it, empty only at the end."""
        await self._arrived.wait()
        taken, self._outputs = self._outputs, []
        if not self._has_ended:
            self._arrived.clear()
        return taken

    def _put(self, outputs: Sequence[Output]) -> None:
        self._outputs.extend(outputs)
        self._arrived.set()

    def _end(self) -> None:
        self._has_ended = True
        self._arrived.set()
