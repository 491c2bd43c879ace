"""How Ray Serve says that a client left, turned into how every other server says it."""

from __future__ import annotations

from ray.exceptions import RayError
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class Disconnects:
    """ASGI middleware outside of all others.

    A replica receives through a call to the proxy that holds the connection. When the client
    leaves, Ray cancels that call, or it is lost with the proxy: then ``receive`` would raise.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def receive_or_leave() -> Message:
            try:
                return await receive()
            except RayError:
                return {"type": "http.disconnect"}

        wrapped = receive_or_leave if scope["type"] == "http" else receive
        await self._app(scope, wrapped, send)
