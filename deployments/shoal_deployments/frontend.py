"""One HTTP process: the application of ``app.py`` over the engines, as a Ray Serve replica."""

from __future__ import annotations

import logging
import sys
from functools import partial

from fastapi import FastAPI
from ray import serve

from shoal.config import ServeConfig
from shoal.inference.loading import limits_of, served_tokenizer
from shoal_deployments.app import build_app
from shoal_deployments.engine_client import ModelCard
from shoal_deployments.engines import Engines


def engine_name(place: int) -> str:
    """Name of an engine's actor among the deployment's own."""
    return f"engine-{place}"


class Frontend:
    """What Ray Serve makes of ``build_application``; the HTTP application does all work."""

    def __init__(self, config: ServeConfig) -> None:
        log_to_stderr()
        self._config = config
        folder = config.folder
        self._tokenizer = served_tokenizer(folder)
        card = ModelCard(
            name=config.served_name,
            created=int((folder / "config.json").stat().st_mtime),
            limits=limits_of(folder, config.serve),
        )
        finders = [
            partial(serve.get_deployment_actor, engine_name(place))
            for place in range(config.serve.replicas)
        ]
        self._engines = Engines(card, finders)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Ray Serve on the event loop that serves requests."""
        self._engines.start()
        return build_app(self._engines, self._tokenizer, self._config.serve)


def log_to_stderr() -> None:
    """Have this process's log go to where Ray keeps it, one line for each request."""
    logging.basicConfig(
        level=logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    for package in ("shoal", "shoal_actors", "shoal_deployments"):
        logging.getLogger(package).setLevel(logging.INFO)
