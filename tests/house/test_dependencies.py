"""What is imported is listed, what is listed is imported, and each has its reason beside it."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OWN = {"shoal", "shoal_actors", "shoal_deployments", "tests"}

LISTS: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "dependencies": ([], ("platform", "actors", "deployments")),
    "demo": (["demo"], ("examples",)),
    "dev": (["dev"], ("tests",)),
}
"""The extras that the sources of some folders may use beside ``dependencies``."""

APART = {
    "vllm": "an environment of its own, requirements/vllm.txt",
    "tensorboard": "torch writes its event files with it",
    "pytest-timeout": "pytest loads it",
    "pytest-xdist": "pytest loads it",
    "flask": "moto loads it",
    "flask-cors": "moto loads it",
    "ruff": "a command",
    "mypy": "a command",
    "import-linter": "a command",
    "types-pyyaml": "mypy reads it",
    "types-jsonschema": "mypy reads it",
}
"""Not both listed and imported, for these reasons."""


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _listed(*extras: str) -> set[str]:
    """Names of the distributions that some extras ask for, or the package itself without any."""
    found = [PROJECT["optional-dependencies"][extra] for extra in extras]
    wanted = sum(found, []) if extras else PROJECT["dependencies"]
    return {_normal(re.split(r"[\[<>=~! ]", each, maxsplit=1)[0]) for each in wanted}


def _imported(folders: tuple[str, ...]) -> set[str]:
    """Names of the distributions that the sources in some folders import."""
    modules: set[str] = set()
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                modules.add(node.module.split(".")[0])
    modules -= OWN | sys.stdlib_module_names | {path.stem for path in ROOT.glob("examples/*.py")}
    owners = packages_distributions()
    return {_normal(owners.get(module, [module])[0]) for module in modules}


@pytest.mark.parametrize("name", LISTS)
def test_what_is_imported_is_listed(name: str) -> None:
    extras, folders = LISTS[name]
    listed = _listed() | (_listed(*extras) if extras else set())
    assert _imported(folders) - listed <= APART.keys()


@pytest.mark.parametrize("name", LISTS)
def test_what_is_listed_is_imported(name: str) -> None:
    extras, folders = LISTS[name]
    assert _listed(*extras) - _imported(folders) <= APART.keys()


def test_each_has_its_reason_beside_it() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    for each in sum(PROJECT["optional-dependencies"].values(), PROJECT["dependencies"]):
        assert re.search(rf'^    "{re.escape(each)}",  # \w', text, re.MULTILINE), each
