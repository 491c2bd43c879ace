"""What a cluster can never place is refused, not waited for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ray import serve

from shoal.config import ServeConfig, serve_config_from_tree
from shoal.errors import ConfigError
from shoal.inference.refusals import check_machine
from shoal_actors.driver import Cluster
from shoal_deployments.application import build_application
from shoal_deployments.checks import check_places, check_unserved
from tests.e2e.shoal_process import ShoalProcess
from tests.inference.small_models import random_folder
from tests.models.tiny import TINY

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


@pytest.mark.parametrize(
    ("settings", "refusal"),
    [
        ({"threads": 3}, r"serve\.threads = 3: this machine has 2 CPUs\. Use at most 2\."),
        ({"replicas": 1024}, r"serve\.replicas = 1024: .* are 2048 processes.* Use 32 at most"),
        ({"frontends": 32}, r"serve\.frontends = 32: 1 engines and 32 frontends are 33 processes"),
    ],
)
def test_what_this_machine_cannot_bear_is_refused(settings: dict[str, int], refusal: str) -> None:
    with pytest.raises(ConfigError, match=refusal):
        check_machine(_config(**settings).serve, num_cpus=2, free_bytes=8 * 2**30)


def test_what_this_machine_can_bear_passes() -> None:
    settings = _config(replicas=16, frontends=16, threads=2).serve
    check_machine(settings, num_cpus=2, free_bytes=8 * 2**30)


@pytest.mark.parametrize(
    ("setting", "refusal"),
    [
        ("host=192.0.2.1", "serve.host = '192.0.2.1': no server can listen there"),
        ("threads=1024", "serve.threads = 1024: this machine has"),
        ("kv.tokens=1000000000000", "serve.kv.tokens = 1000000000000: they take"),
    ],
)
def test_the_command_refuses_it_before_ray_starts(
    setting: str, refusal: str, tmp_path: Path
) -> None:
    folder = random_folder(TINY["smollm2"], tmp_path / "m")
    settings = ["--set", "serve.port=0", "--set", f"serve.{setting}"]
    with ShoalProcess(["serve", str(folder), *settings], tmp_path) as command:
        assert command.wait() == 2
    assert command.output.startswith(refusal)


def test_every_engine_gets_the_pool_that_was_planned() -> None:
    application: Any = build_application(_config(replicas=2), 7)
    actors = application._bound_deployment._deployment_config.deployment_actors
    assert [actor.init_kwargs["num_blocks"] for actor in actors] == [7, 7]


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
