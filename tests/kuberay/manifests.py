"""The manifests of ``kuberay/`` as the tests see them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "kuberay/overlays/cluster/raycluster.yaml"
JOB = ROOT / "kuberay/overlays/job/rayjob.yaml"
SERVICE = ROOT / "kuberay/overlays/serve/rayservice.yaml"
CLUSTER_KEYS = {"RayJob": "rayClusterSpec", "RayService": "rayClusterConfig"}


def load(path: Path) -> dict[str, Any]:
    """The one document of a file."""
    document = yaml.safe_load(path.read_text())
    assert isinstance(document, dict)
    return document


def cluster_spec(document: dict[str, Any]) -> dict[str, Any]:
    """The cluster that a RayCluster is, or that a RayJob or RayService holds."""
    spec: dict[str, Any] = document["spec"]
    key = CLUSTER_KEYS.get(document["kind"])
    return spec if key is None else spec[key]


def groups(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Head group first, then the worker groups."""
    spec = cluster_spec(document)
    return [spec["headGroupSpec"], *spec["workerGroupSpecs"]]


def pods(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Pod specs of all groups, and of the submitter where there is one."""
    templates = [group["template"] for group in groups(document)]
    submitter = document["spec"].get("submitterPodTemplate")
    return [template["spec"] for template in templates + ([submitter] if submitter else [])]


def values(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf of a document with its dotted path."""
    if isinstance(node, dict):
        for key, child in node.items():
            yield from values(child, f"{path}.{key}" if path else str(key))
    elif isinstance(node, list):
        for index, child in enumerate(node):
            yield from values(child, f"{path}.{index}")
    else:
        yield path, node
