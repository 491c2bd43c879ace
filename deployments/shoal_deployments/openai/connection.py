"""Work for a client, for as long as the client is there."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

T = TypeVar("T")


class ClientLeft(Exception):
    """The client closed the connection, or its writing half; there is nobody to answer."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What ``work`` returns; it is cancelled, and has ended, when this raises.

    Raises:
        ClientLeft: the server reported that the client left.
    """
    worker = asyncio.create_task(work)
    watcher = asyncio.create_task(_until_left(receive))
    tasks = (worker, watcher)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not worker.done():
            watcher.result()
            raise ClientLeft
        return worker.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _until_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
