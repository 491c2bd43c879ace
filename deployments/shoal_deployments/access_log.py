"""One line for each request, and its numbers in the metrics."""

from __future__ import annotations

import asyncio
import logging
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal_deployments.console import CONSOLE_PATHS
from shoal_deployments.metrics import Metrics
from shoal_deployments.route_path import route_path

logger = logging.getLogger(__name__)

LEFT = 499
"""Status under which a request is noted whose client did not wait for the end of the answer."""

PATHS = CONSOLE_PATHS | {
    "/health",
    "/metrics",
    "/stats",
    "/v1/models",
    "/v1/completions",
    "/v1/chat/completions",
}


def note_left(scope: Scope) -> None:
    """Have the request of ``scope`` noted under status 499."""
    scope.setdefault("state", {})["left"] = True


class AccessLog:
    """ASGI middleware, the outermost."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        status = 500
        begin = time.perf_counter()

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except asyncio.CancelledError:
            # Ray Serve cancels the request whose client left.
            state["left"] = True
            raise
        finally:
            status = LEFT if state.get("left") else status
            self._note(scope, status, time.perf_counter() - begin)

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        # Paths that a client made up would each be a row of their own.
        path = route_path(scope)
        path = path if path in PATHS else "other"
        self._metrics.requests.labels(path, str(status)).inc()
        self._metrics.request_seconds.labels(path).observe(seconds)
        shown = ascii(scope["path"][:200])[1:-1]
        logger.info("%s %s %d %.3f s", scope["method"], shown, status, seconds)
