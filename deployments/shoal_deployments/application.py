"""The Ray Serve application: HTTP frontends, and engine actors that they share.

    shoal serve ── build_application ──> controller ──┬── frontends (replicas of one deployment)
    or a RayService: build                            └── engines (actors of that deployment)

The controller starts the engines first, starts a new one wherever one has died, and only then the
frontends, which find the engines by name.
"""

from __future__ import annotations

from typing import Any

import ray
from ray import serve
from ray.serve.config import DeploymentActorConfig
from ray.serve.schema import LoggingConfig

from shoal.config import ServeConfig, serve_config_from_tree
from shoal_actors.engine import EngineActor
from shoal_deployments.frontend import Frontend, engine_name

MAX_ONGOING = 1_000_000
"""No limit at all: how much a frontend takes is its own business, and it refuses at once."""
_IDLE_LOOK_S = 0.2
"""Seconds between two looks of a frontend that ends at whether its requests are over."""
MAX_STARTS = 3
"""After so many engines in a row that could not be started, the application has failed."""


def build(tree: dict[str, Any]) -> serve.Application:
    """The application for ``import_path`` and ``args`` of a Serve configuration file.

    ``tree`` holds what a file for ``shoal serve`` holds: ``model.path`` and ``serve``.
    """
    return build_application(serve_config_from_tree(tree))


def build_application(config: ServeConfig, num_blocks: int | None = None) -> serve.Application:
    """The application that serves ``config``'s model.

    ``num_blocks`` is the size of each engine's pool, also when it is started again, where all of
    them share a machine; unset, each engine decides by what it finds where it runs.
    """
    settings = config.placed
    engines = [
        DeploymentActorConfig(
            name=engine_name(place),
            actor_class=ray.remote(EngineActor),
            init_kwargs={
                "folder": str(config.folder),
                "settings": settings,
                "place": place,
                "num_blocks": num_blocks,
            },
            actor_options={"num_cpus": settings.threads, "max_concurrency": 10_000},
        )
        for place in range(settings.replicas)
    ]
    deployment = serve.deployment(
        serve.ingress()(Frontend),
        name="frontend",
        num_replicas=settings.num_frontends,
        max_ongoing_requests=MAX_ONGOING,
        max_constructor_retry_count=MAX_STARTS,
        ray_actor_options={"num_cpus": 1},
        deployment_actors=engines,
        graceful_shutdown_timeout_s=settings.drain_timeout_s,
        graceful_shutdown_wait_loop_s=_IDLE_LOOK_S,
        logging_config=LoggingConfig(enable_access_log=False),
    )
    return deployment.bind(config)
