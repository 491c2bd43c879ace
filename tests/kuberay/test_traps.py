"""Traps that the resource definitions let through."""

from __future__ import annotations

import importlib.metadata
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.scripts.scripts import drain_node

from tests.kuberay.manifests import (
    CLUSTER,
    JOB,
    ROOT,
    SERVICE,
    cluster_spec,
    groups,
    load,
    pods,
    values,
)

GIBIBYTE = 2**30
SUFFIXES = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
NAME_LIMITS = {"RayCluster": 53, "RayJob": 47, "RayService": 47}


@pytest.fixture(params=[CLUSTER, JOB, SERVICE], ids=lambda path: path.stem)
def document(request: pytest.FixtureRequest) -> dict[str, Any]:
    return load(request.param)


@pytest.fixture
def job() -> dict[str, Any]:
    return load(JOB)


def _bytes(quantity: str) -> int:
    return int(quantity[:-2]) * SUFFIXES[quantity[-2:]]


def _containers(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [container for pod in pods(document) for container in pod["containers"]]


def test_names_fit(document: dict[str, Any]) -> None:
    assert document["apiVersion"] == "ray.io/v1"
    name = document["metadata"]["name"]
    assert re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", name)
    assert len(name) <= NAME_LIMITS[document["kind"]]


def test_ray_version_is_the_installed_one_everywhere(document: dict[str, Any]) -> None:
    installed = importlib.metadata.version("ray")
    assert cluster_spec(document)["rayVersion"] == installed
    for container in _containers(document):
        assert container["image"].endswith(f"-ray{installed}")
    dockerfile = (ROOT / "kuberay/Dockerfile").read_text()
    assert set(re.findall(r"rayproject/ray:([0-9.]+)-", dockerfile)) == {installed}
    assert set(re.findall(r"-t (\S+)", dockerfile)) == {_containers(document)[0]["image"]}


def test_authentication_is_really_on(document: dict[str, Any]) -> None:
    assert cluster_spec(document)["authOptions"] == {"mode": "token"}
    names = [variable["name"] for c in _containers(document) for variable in c.get("env", [])]
    assert not [name for name in names if name.startswith("RAY_AUTH")]  # the operator's to set


def test_head_runs_no_work_and_has_memory(document: dict[str, Any]) -> None:
    head = cluster_spec(document)["headGroupSpec"]
    limits = head["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert head["rayStartParams"]["num-cpus"] == "0"
    assert _bytes(limits["memory"]) >= 8 * GIBIBYTE
    assert not [name for name in limits if name.endswith("gpu")]


def test_requests_equal_limits(document: dict[str, Any]) -> None:
    for container in _containers(document):
        resources = container["resources"]
        assert resources["requests"] == resources["limits"]
        assert {"cpu", "memory"} <= set(resources["limits"])


def test_start_parameters_are_strings_and_fit(document: dict[str, Any]) -> None:
    for group in groups(document):
        parameters = group["rayStartParams"]
        assert all(isinstance(value, str) for value in parameters.values())
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        assert int(parameters["object-store-memory"]) <= _bytes(limits["memory"]) // 3


def test_worker_groups_have_a_fixed_checked_size(document: dict[str, Any]) -> None:
    spec = cluster_spec(document)
    names = [group["groupName"] for group in spec["workerGroupSpecs"]]
    assert len(set(names)) == len(names) > 0
    assert spec["enableInTreeAutoscaling"] is False
    for group in spec["workerGroupSpecs"]:
        assert group["minReplicas"] == group["replicas"] == group["maxReplicas"] > 0


@pytest.mark.parametrize("path", [CLUSTER, JOB], ids=lambda path: path.stem)
def test_workers_hold_the_demo(path: Path) -> None:
    demo = yaml.safe_load((ROOT / "examples/demo.yaml").read_text())
    workers = sum(
        group["replicas"]
        * int(group["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"])
        for group in cluster_spec(load(path))["workerGroupSpecs"]
    )
    assert workers >= demo["cluster"]["workers"] * demo["cluster"].get("threads_per_worker", 1)


def test_pods_give_up_every_privilege(document: dict[str, Any]) -> None:
    for pod in pods(document):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            }


def test_pods_drain(document: dict[str, Any]) -> None:
    for group in groups(document):
        pod = group["template"]["spec"]
        assert pod["restartPolicy"] == "Never"
        assert pod["terminationGracePeriodSeconds"] >= 60
        assert "ray stop" in pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][-1]


@pytest.mark.parametrize("path", [CLUSTER, JOB], ids=lambda path: path.stem)
def test_workers_of_a_run_are_told_before_their_node_ends(path: Path) -> None:
    _, group = groups(load(path))
    pod = group["template"]["spec"]
    shell, flag, script = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert (shell, flag) == ("/bin/sh", "-c")
    drain, wait, body, done, stop = script.split("; ")
    command = shlex.split(drain)
    assert command[:4] == ["timeout", "20", "ray", "drain-node"] and stop == "ray stop"
    # The command takes these, and what is waited for is there while a worker runs only.
    options = drain_node.make_context("drain-node", command[4:]).params
    assert options["reason"] == "DRAIN_NODE_REASON_PREEMPTION"
    assert 30 <= options["deadline_remaining_seconds"] < pod["terminationGracePeriodSeconds"]
    ends = subprocess.run(
        [
            "/bin/sh",
            "-c",
            "; ".join([wait.replace("[R]ayTrainWorker", "[N]oSuchWorker"), body, done]),
        ],
        timeout=20,
        check=False,
    )
    assert ends.returncode == 0, "the script itself is not taken for a worker"


def test_every_ray_pod_mounts_the_shared_folder(document: dict[str, Any]) -> None:
    claim = load(ROOT / "kuberay/base/storage.yaml")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    for group in groups(document):
        pod = group["template"]["spec"]
        (volume,) = pod["volumes"]
        assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        (mount,) = pod["containers"][0]["volumeMounts"]
        assert (mount["name"], mount["mountPath"]) == (volume["name"], "/mnt/shoal")


def test_no_null_no_latest_no_float(document: dict[str, Any]) -> None:
    for path, value in values(document):
        assert value is not None, path
        assert not isinstance(value, float), path
    for container in _containers(document):
        assert ":" in container["image"]
        assert not container["image"].endswith(":latest")
        names = [variable["name"] for variable in container.get("env", [])]
        assert len(names) == len(set(names))


def test_job_and_cluster_are_the_same_cluster(job: dict[str, Any]) -> None:
    assert cluster_spec(job) == cluster_spec(load(CLUSTER))


def test_job_entrypoint_is_one_command_that_resumes(job: dict[str, Any]) -> None:
    entrypoint = job["spec"]["entrypoint"]
    # Whatever a shell would split or expand runs in the submitter's pod instead of the cluster.
    assert not re.search(r"[;&|<>`$'\"\\(){}*\n]", entrypoint)
    assert "--fresh" not in entrypoint
    script = re.search(r"/home/ray/shoal/(\S+)", entrypoint)
    assert script is not None
    assert (ROOT / script[1]).is_file()
    assert "/mnt/shoal" in entrypoint


def test_job_ends_and_cleans_up_on_purpose(job: dict[str, Any]) -> None:
    spec = job["spec"]
    assert spec["submissionMode"] == "K8sJobMode"
    assert spec["backoffLimit"] > 0
    assert spec["submitterConfig"]["backoffLimit"] >= 0
    assert 0 < spec["preRunningDeadlineSeconds"] < spec["activeDeadlineSeconds"]
    assert not {"shutdownAfterJobFinishes", "ttlSecondsAfterFinished"} & set(spec)
    rules = spec["deletionStrategy"]["deletionRules"]
    kept_s: dict[str, dict[str, int]] = {}
    for rule in rules:
        condition = dict(rule["condition"])
        ttl_s = condition.pop("ttlSeconds")
        ((kind, state),) = condition.items()
        of_state = kept_s.setdefault(f"{kind} {state}", {})
        assert rule["policy"] not in of_state
        of_state[rule["policy"]] = ttl_s
    failed = kept_s["jobStatus FAILED"]
    assert failed["DeleteWorkers"] <= failed["DeleteCluster"]
    assert failed["DeleteCluster"] >= 3600  # time to read the logs
    assert set(kept_s) == {"jobStatus SUCCEEDED", "jobStatus FAILED", "jobDeploymentStatus Failed"}


@pytest.mark.parametrize(
    ("overlay", "kind"), [("cluster", "RayCluster"), ("job", "RayJob"), ("serve", "RayService")]
)
def test_overlays_build(overlay: str, kind: str) -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed")
    folder: Path = ROOT / "kuberay/overlays" / overlay
    built = subprocess.run(
        [kubectl, "kustomize", str(folder)], capture_output=True, text=True, check=True
    )
    kinds = [built_document["kind"] for built_document in yaml.safe_load_all(built.stdout)]
    assert kinds == ["PersistentVolumeClaim", kind]
