"""Which files a source names."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest

from shoal.config import SourceSettings
from shoal.data.source import list_files, megatron_prefix
from shoal.errors import ConfigError

FIELD = "data.sources.3"


def _write(folder: Path, *names: str, content: bytes = b"text") -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def _names(path: Path | str, folder: Path, **settings: Any) -> list[tuple[str, str]]:
    files = list_files(SourceSettings(path=str(path), **settings), FIELD)
    return [(os.path.relpath(file.path, folder), file.format) for file in files]


def test_a_folder_is_walked_in_order_without_hidden_and_binary_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _write(tmp_path, "b.md", "a/z.py", "a-b.txt", "a/b/c", ".git/config", "a/.hidden", "A.txt")
    _write(tmp_path, "rows.JSONL", "table.parquet")
    _write(tmp_path, "a/__pycache__/z.pyc", "picture.png", content=b"\x89PNG\0")
    with caplog.at_level(logging.INFO):
        names = _names(tmp_path, tmp_path)
    assert names == [
        ("A.txt", "text"),
        ("a/b/c", "text"),
        ("a/z.py", "text"),
        ("a-b.txt", "text"),
        ("b.md", "text"),
        ("rows.JSONL", "jsonl"),
        ("table.parquet", "parquet"),
    ]
    assert "left out 2 binary files" in caplog.text


def test_include_takes_file_names(tmp_path: Path) -> None:
    _write(tmp_path, "a.py", "b/c.py", "b/c.pyi", "d.md")
    assert _names(tmp_path, tmp_path, include=("*.py", "d.*")) == [
        ("a.py", "text"),
        ("b/c.py", "text"),
        ("d.md", "text"),
    ]
    with pytest.raises(ConfigError, match="none of the 4 files") as refusal:
        _names(tmp_path, tmp_path, include=("*.rs",))
    assert refusal.value.field == f"{FIELD}.include"


def test_a_pattern_may_name_files_and_folders(tmp_path: Path) -> None:
    _write(tmp_path, "x1/a.txt", "x1/b.txt", "x2.txt", "y.txt")
    names = [("x1/a.txt", "text"), ("x1/b.txt", "text"), ("x2.txt", "text")]
    assert _names(tmp_path / "x*", tmp_path) == names
    assert _names(tmp_path / "**" / "[ab].txt", tmp_path) == names[:2]


def test_a_file_whose_name_looks_like_a_pattern_is_that_file(tmp_path: Path) -> None:
    _write(tmp_path, "a[1].txt", "a1.txt")
    assert _names(tmp_path / "a[1].txt", tmp_path) == [("a[1].txt", "text")]


def test_links_to_folders_are_not_followed(tmp_path: Path) -> None:
    _write(tmp_path, "a/x.txt")
    (tmp_path / "a" / "loop").symlink_to(tmp_path / "a")
    (tmp_path / "a" / "y.txt").symlink_to(tmp_path / "a" / "x.txt")
    (tmp_path / "a" / "gone.txt").symlink_to(tmp_path / "nowhere")
    assert _names(tmp_path / "a", tmp_path) == [("a/x.txt", "text"), ("a/y.txt", "text")]


def test_a_format_named_for_a_folder_takes_its_endings_only(tmp_path: Path) -> None:
    _write(tmp_path, "a.jsonl", "b.ndjson", "c.json", "README.md")
    names = [("a.jsonl", "jsonl"), ("b.ndjson", "jsonl")]
    assert _names(tmp_path, tmp_path, format="jsonl") == names
    assert _names(tmp_path, tmp_path, format="jsonl", include=("*.json",)) == [("c.json", "jsonl")]
    assert _names(tmp_path / "c.json", tmp_path, format="jsonl") == [("c.json", "jsonl")]
    assert _names(tmp_path / "a.jsonl", tmp_path, format="text") == [("a.jsonl", "text")]


@pytest.mark.parametrize(
    ("path", "settings", "problem"),
    [
        ("absent.txt", {}, "no such file or folder"),
        ("absent/*.txt", {}, "no file matches the pattern"),
        ("empty.txt", {}, "it is empty"),
        ("empty_folder", {}, "it holds no text file"),
        ("folder_of_empty", {}, "it is empty"),
        ("picture.png", {}, "it is a binary file"),
        ("pipe", {}, "neither a file nor a folder"),
        ("empty_folder", {"format": "parquet"}, "it holds no parquet file"),
    ],
)
def test_nothing_to_read_is_refused(
    tmp_path: Path, path: str, settings: dict[str, Any], problem: str
) -> None:
    (tmp_path / "empty_folder").mkdir()
    _write(tmp_path, "empty.txt", "folder_of_empty/a", "folder_of_empty/b", content=b"")
    _write(tmp_path, "picture.png", content=b"\x89PNG\0")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=problem) as refusal:
        _names(tmp_path / path, tmp_path, **settings)
    assert refusal.value.field == f"{FIELD}.path"
    assert str(refusal.value.value).endswith(path)


def test_when_a_source_is_tokenized_already(tmp_path: Path) -> None:
    _write(tmp_path, "a.bin", "a.idx", "b.bin", "c.v1.bin", "c.v1.idx")

    def prefix(name: str, **settings: Any) -> str | None:
        found = megatron_prefix(SourceSettings(path=str(tmp_path / name), **settings))
        return None if found is None else os.path.relpath(found, tmp_path)

    assert [prefix(name) for name in ("a", "a.bin", "a.idx")] == ["a", "a", "a"]
    assert prefix("c.v1") == "c.v1"
    assert prefix("b.bin") is None
    assert prefix("absent") is None
    assert prefix("absent", format="megatron") == "absent"
    assert prefix("a", format="text") is None
