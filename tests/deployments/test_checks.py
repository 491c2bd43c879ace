"""What a cluster can never place is refused, not waited for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from ray import serve

from shoal.config import ServeConfig, serve_config_from_tree
from shoal.errors import ConfigError
from shoal_actors.driver import Cluster
from shoal_deployments.checks import check_places, check_unserved

CLUSTER = Cluster(is_own=False, nodes=({"CPU": 4.0}, {"CPU": 3.0}, {"GPU": 8.0}), limit=None)


def _config(**serve: int) -> ServeConfig:
    return serve_config_from_tree({"model": {"path": "m"}, "serve": serve})


def test_what_fits_passes() -> None:
    check_places(_config(replicas=2, threads=2, frontends=3), CLUSTER)
    check_places(_config(replicas=3, threads=8), replace(CLUSTER, limit={"CPU": 27.0}))


@pytest.mark.parametrize(
    ("serve", "refusal"),
    [
        (
            {"replicas": 4, "threads": 2},
            r"serve\.replicas = 4: .* room for 3 engines of 2 CPUs each.* Use at most 3\.",
        ),
        ({"threads": 5}, r"serve\.replicas = 1: .* room for 0 engines.* Lower serve\.threads\."),
        (
            {"replicas": 3, "threads": 2, "frontends": 2},
            r"serve\.frontends = 2: with 3 engines of 2 CPUs each they take 8 CPUs, and the "
            r"cluster has 7\.",
        ),
    ],
)
def test_what_can_never_be_placed_is_refused(serve: dict[str, int], refusal: str) -> None:
    with pytest.raises(ConfigError, match=refusal):
        check_places(_config(**serve), CLUSTER)


def test_what_others_serve_on_a_cluster_is_left_alone(ray_session: Cluster) -> None:
    cluster = replace(ray_session, is_own=False)
    check_unserved(cluster)
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": 0})
    try:
        with pytest.raises(ConfigError, match="Ray Serve runs on that cluster already"):
            check_unserved(cluster)
        check_unserved(replace(cluster, is_own=True))
    finally:
        serve.shutdown()
    check_unserved(cluster)
