"""One HTTP process: the application of ``http_app.py`` over the engines, as a Ray Serve replica."""

from __future__ import annotations

import asyncio
import logging
import sys
from functools import partial

from fastapi import FastAPI
from ray import serve

from shoal.config import ServeConfig
from shoal.inference.loading import served_tokenizer
from shoal.models import weights_mark
from shoal_deployments.disconnects import Disconnects
from shoal_deployments.engines import Engines
from shoal_deployments.http_app import build_http_app

CONNECT_TIMEOUT_S = 60.0
"""What engines that are ready may take to answer for the first time."""


def engine_name(place: int) -> str:
    """Name of an engine's actor among the deployment's own."""
    return f"engine-{place}"


class Frontend:
    """What Ray Serve makes of ``build_application``; the HTTP application does all work."""

    def __init__(self, config: ServeConfig) -> None:
        log_to_stderr()
        self._config = config
        self._tokenizer = served_tokenizer(config.folder)

    async def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Ray Serve on the event loop that serves requests, once the engines are up."""
        config = self._config
        finders = [
            partial(serve.get_deployment_actor, engine_name(place))
            for place in range(config.serve.replicas)
        ]
        engines = await Engines.connect(
            finders,
            name=config.served_name,
            created=int((config.folder / "config.json").stat().st_mtime),
            weights=await asyncio.to_thread(weights_mark, config.folder),
            timeout_s=CONNECT_TIMEOUT_S,
            patience_s=config.serve.stall_s,
        )
        app = build_http_app(engines, self._tokenizer, config.serve)
        app.add_middleware(Disconnects)
        app.router.add_event_handler("shutdown", engines.close)
        return app


def log_to_stderr() -> None:
    """Have this process's log go to where Ray keeps it, one line for each request."""
    logging.basicConfig(
        level=logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    for package in ("shoal", "shoal_actors", "shoal_deployments"):
        logging.getLogger(package).setLevel(logging.INFO)
