"""What is refused once the cluster is known, before anything of the application starts."""

from __future__ import annotations

import os

from ray import serve

from shoal.config import ServeConfig
from shoal.errors import ConfigError
from shoal_actors.driver import Cluster


def check_places(config: ServeConfig, cluster: Cluster) -> None:
    """Refuse more engines and frontends than the cluster can ever place; raises ConfigError."""
    settings = config.serve
    engine, frontend = {"CPU": float(settings.threads)}, {"CPU": 1.0}
    if (places := cluster.num_places(engine)) < settings.replicas:
        raise ConfigError(
            "serve.replicas",
            settings.replicas,
            f"the cluster has room for {places} engines of {settings.threads} CPUs each, and "
            "cannot grow further",
            f"Use at most {places}" if places else "Lower serve.threads",
        )
    if (cpus := cluster.num_places(frontend)) < settings.num_cpus:
        raise ConfigError(
            "serve.frontends",
            settings.num_frontends,
            f"with {settings.replicas} engines of {settings.threads} CPUs each they take "
            f"{settings.num_cpus} CPUs, and the cluster has {cpus}",
            "Lower one of serve.frontends, serve.replicas and serve.threads",
        )


def check_unserved(cluster: Cluster) -> None:
    """Refuse a cluster on which Serve runs already; raises ConfigError.

    Its port is chosen, and shutting it down at our end would end what others serve there.
    """
    if cluster.is_own:
        return
    status = serve.status()
    if status.applications or status.proxies:
        raise ConfigError(
            "RAY_ADDRESS",
            os.environ.get("RAY_ADDRESS"),
            "Ray Serve runs on that cluster already",
            "Deploy shoal_deployments.application:build there with serve deploy, or end what "
            "runs with serve shutdown",
        )
