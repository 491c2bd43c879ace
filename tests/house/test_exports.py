"""The face of a package defines nothing, and its ``__all__`` names all that it imports."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FACES = [
    face
    for folder in ("platform", "actors", "deployments")
    for face in sorted((ROOT / folder).rglob("__init__.py"))
]


def _package(face: Path) -> str:
    """Dotted name of the package whose ``__init__.py`` is ``face``."""
    return ".".join(face.parent.relative_to(ROOT).parts[1:])


def _declared(tree: ast.Module) -> list[str]:
    """What ``__all__`` says; empty without one."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and [ast.unparse(t) for t in node.targets] == ["__all__"]:
            return [str(name) for name in ast.literal_eval(node.value)]
    return []


def _imported(tree: ast.Module) -> list[str]:
    """Names that the package takes from its own modules."""
    return [
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module != "__future__"
        for alias in node.names
    ]


@pytest.mark.parametrize("face", FACES, ids=_package)
def test_a_package_only_re_exports(face: Path) -> None:
    tree = ast.parse(face.read_text())
    assert ast.get_docstring(tree), "say in one line what the package is"
    for node in tree.body[1:]:
        is_all = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        assert is_all or isinstance(node, ast.ImportFrom), f"line {node.lineno}: belongs in a file"


@pytest.mark.parametrize("face", FACES, ids=_package)
def test_all_is_sorted_and_complete(face: Path) -> None:
    tree = ast.parse(face.read_text())
    assert _declared(tree) == sorted(set(_imported(tree)))
    package = importlib.import_module(_package(face))
    for name in _declared(tree):
        assert hasattr(package, name)
