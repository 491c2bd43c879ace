"""The manifests against the strict schemas of KubeRay's resource definitions."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.kuberay.manifests import CLUSTER, JOB, ROOT, SERVICE, load

SCHEMAS = ROOT.parent / "shared" / "kuberay-1.7.0"
KINDS = {CLUSTER: "raycluster", JOB: "rayjob", SERVICE: "rayservice"}


@pytest.fixture(params=KINDS, ids=lambda path: path.stem)
def manifest(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


@pytest.fixture
def schema(manifest: Path) -> dict[str, Any]:
    path = SCHEMAS / f"{KINDS[manifest]}.schema.json.gz"
    if not path.exists():
        pytest.skip("the schemas of KubeRay 1.7.0 do not lie beside this repository")
    loaded: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return loaded


def test_fits_the_resource_definition(manifest: Path, schema: dict[str, Any]) -> None:
    errors = jsonschema.Draft202012Validator(schema).iter_errors(load(manifest))
    assert [f"{error.json_path}: {error.message}" for error in errors] == []


def test_the_schema_sees_a_misspelt_field(manifest: Path, schema: dict[str, Any]) -> None:
    document = load(manifest)
    document["spec"]["rayVersoin"] = "2.60.0"
    assert not jsonschema.Draft202012Validator(schema).is_valid(document)
