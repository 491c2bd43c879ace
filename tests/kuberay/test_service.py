"""The RayService: what it serves, when it is ready, how it drains."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from pydantic import BaseModel
from ray import serve
from ray.serve.schema import HTTPOptionsSchema, ServeApplicationSchema, ServeDeploySchema

from shoal.config import serve_config_from_tree
from shoal.errors import ConfigError
from shoal_deployments.auth import OPEN_PATHS
from tests.kuberay.manifests import ROOT, SERVICE, cluster_spec, load


@pytest.fixture
def spec() -> dict[str, Any]:
    service: dict[str, Any] = load(SERVICE)["spec"]
    return service


@pytest.fixture
def config(spec: dict[str, Any]) -> dict[str, Any]:
    """What the string ``serveConfigV2`` holds."""
    assert isinstance(spec["serveConfigV2"], str)
    parsed = yaml.safe_load(spec["serveConfigV2"])
    assert isinstance(parsed, dict)
    return parsed


@pytest.fixture
def application(config: dict[str, Any]) -> dict[str, Any]:
    (only,) = config["applications"]
    assert isinstance(only, dict)
    return only


@pytest.fixture
def group() -> dict[str, Any]:
    (only,) = cluster_spec(load(SERVICE))["workerGroupSpecs"]
    assert isinstance(only, dict)
    return only


@pytest.fixture
def worker(group: dict[str, Any]) -> dict[str, Any]:
    container: dict[str, Any] = group["template"]["spec"]["containers"][0]
    return container


def _unknown(tree: dict[str, Any], model: type[BaseModel]) -> Iterator[str]:
    """Keys that ``model`` would take in silence and not look at."""
    yield from sorted(tree.keys() - model.model_fields.keys())


def _unknown_keys(config: dict[str, Any]) -> list[str]:
    return [
        *_unknown(config, ServeDeploySchema),
        *_unknown(config["http_options"], HTTPOptionsSchema),
        *(key for each in config["applications"] for key in _unknown(each, ServeApplicationSchema)),
    ]


def test_serve_config_is_one_that_serve_takes(config: dict[str, Any]) -> None:
    parsed = ServeDeploySchema.model_validate(config)
    assert [each.name for each in parsed.applications] == ["shoal"]
    assert _unknown_keys(config) == []


def test_a_misspelt_key_is_seen(config: dict[str, Any]) -> None:
    wrong = copy.deepcopy(config)
    wrong["applications"][0]["importPath"] = "anything"
    wrong["httpOptions"] = {}
    ServeDeploySchema.model_validate(wrong)
    assert _unknown_keys(wrong) == ["httpOptions", "importPath"]


def test_import_path_and_args_build_the_application(application: dict[str, Any]) -> None:
    module, _, name = application["import_path"].partition(":")
    builder = getattr(importlib.import_module(module), name)
    assert isinstance(builder(application["args"]), serve.Application)
    with pytest.raises(ConfigError, match="replicsa"):
        builder({**application["args"], "serve": {"replicsa": 2}})


def test_serves_what_the_job_exports(application: dict[str, Any]) -> None:
    demo = (ROOT / "examples/demo.py").read_text()
    folder = application["args"]["model"]["path"].removeprefix("/mnt/shoal/")
    assert f'EXPORT = Path("{folder}")' in demo


def test_each_worker_has_room_for_one_engine_and_one_frontend(
    application: dict[str, Any], group: dict[str, Any], worker: dict[str, Any]
) -> None:
    config = serve_config_from_tree(application["args"])
    settings = config.serve
    cpus = int(worker["resources"]["limits"]["cpu"])
    assert group["replicas"] == settings.replicas == settings.num_frontends
    assert config.serve.num_cpus == group["replicas"] * cpus
    # Neither two engines, nor frontends alone: a worker without a frontend is never ready.
    assert settings.threads + 1 == cpus < 2 * settings.threads


def test_every_engine_has_a_cache_of_the_same_size(application: dict[str, Any]) -> None:
    assert application["args"]["serve"]["kv"]["tokens"] > 0


def test_readiness_covers_the_application(
    config: dict[str, Any], application: dict[str, Any], worker: dict[str, Any]
) -> None:
    asked = worker["readinessProbe"]["httpGet"]
    assert application["route_prefix"] == "/"
    assert asked == {"path": "/health", "port": config["http_options"]["port"]}
    assert asked["path"] in OPEN_PATHS  # a probe has no key
    assert config["http_options"]["host"] == "0.0.0.0"  # the kubelet asks the pod's address
    assert config["proxy_location"] == "EveryNode"  # and so asks the proxy of each worker


def test_requests_carry_a_key_from_a_secret(
    application: dict[str, Any], worker: dict[str, Any]
) -> None:
    name = application["args"]["serve"]["auth"]["keys_variable"]
    (variable,) = [each for each in worker["env"] if each["name"] == name]
    assert set(variable["valueFrom"]) == {"secretKeyRef"}


def test_streams_have_time_to_end(group: dict[str, Any], worker: dict[str, Any]) -> None:
    shell, flag, script = worker["lifecycle"]["preStop"]["exec"]["command"]
    assert (shell, flag) == ("/bin/sh", "-c")
    pause, stop = script.split("; ")
    assert stop == "ray stop"
    seconds = int(pause.removeprefix("sleep "))
    assert 30 <= seconds <= group["template"]["spec"]["terminationGracePeriodSeconds"] - 30


def test_upgrade_is_chosen_on_purpose(spec: dict[str, Any]) -> None:
    assert spec["upgradeStrategy"] == {"type": "NewCluster"}
    assert spec["excludeHeadPodFromServeSvc"] is True
