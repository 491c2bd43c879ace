"""Documents of files, cut into shards anywhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.config import SourceSettings
from shoal.data.document import ChatDocument, Document
from shoal.data.reader import read_documents
from shoal.data.shard import plan_shards
from shoal.data.source import list_files
from shoal.errors import ConfigError, WorkError

FIELD = "data.sources.0"


def _read(path: Path, shard_bytes: int = 2**20, **options: Any) -> list[Document]:
    source = SourceSettings(path=str(path), **options)
    shards = plan_shards(list_files(source, FIELD), source, FIELD, shard_bytes)
    assert [shard.number for shard in shards] == list(range(len(shards)))
    return [document for shard in shards for document in read_documents(shard)]


def _contents(documents: list[Document]) -> list[Any]:
    return [
        document.messages if isinstance(document, ChatDocument) else document.text
        for document in documents
    ]


@given(
    texts=st.lists(st.text(), min_size=1, max_size=6),
    line_end=st.sampled_from(["\n", "\r\n", "\n\n", " \n"]),
    ends_with_line_end=st.booleans(),
    shard_bytes=st.integers(1, 60),
)
def test_jsonl_cut_anywhere_gives_each_line_once(
    tmp_path_factory: pytest.TempPathFactory,
    texts: list[str],
    line_end: str,
    ends_with_line_end: bool,
    shard_bytes: int,
) -> None:
    path = tmp_path_factory.mktemp("cut") / "rows.jsonl"
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    path.write_bytes((line_end.join(lines) + line_end * ends_with_line_end).encode())
    assert _contents(_read(path, shard_bytes)) == [text for text in texts if text]


def test_parquet_row_groups_are_read_apart(tmp_path: Path) -> None:
    rows = [{"body": f"text {number}", "other": number} for number in range(11)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=3)
    pq.write_table(pa.Table.from_pylist(rows[:2]), tmp_path / "b.parquet")
    expected = [row["body"] for row in (*rows, *rows[:2])]
    for shard_bytes in (1, 200, 2**20):
        assert _contents(_read(tmp_path, shard_bytes, text_key="body")) == expected


def test_text_files_are_documents_and_empty_ones_none(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_bytes("# Héad\r\n\ttext".encode())
    (tmp_path / "b.py").touch()
    (tmp_path / "c.txt").write_bytes(b"\xef\xbb\xbfmarked")
    documents = _read(tmp_path, shard_bytes=1)
    assert _contents(documents) == ["# Héad\r\n\ttext", "marked"]
    assert str(documents[0].origin) == str(tmp_path / "a.md")


def test_bytes_that_are_not_utf_8_are_replaced_and_told(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"caf\xe9 au lait")
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "caf\xe9"}\n{"text": "good"}\n')
    documents = _read(tmp_path)
    assert _contents(documents) == ["caf\ufffd au lait", "caf\ufffd", "good"]
    assert [document.is_repaired for document in documents] == [True, True, False]


def test_a_row_with_messages_is_a_chat(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]
    rows: list[dict[str, Any]] = [
        {"talk": chat, "body": "ignored"},
        {"talk": None, "body": "plain"},
        {"body": "more"},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "b.parquet")
    keys: dict[str, Any] = {"text_key": "body", "messages_key": "talk"}
    assert _contents(_read(tmp_path, **keys)) == [chat, "plain", "more"] * 2


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n\n{"text": "two"}\n{"text": "thr')
    for shard_bytes in (1, 20, 2**20):
        with pytest.raises(ConfigError, match="line 4.*not JSON") as refusal:
            _read(path, shard_bytes)
        assert refusal.value.field == f"{FIELD}.path"
    path.write_text('{"text": "one"}\n["two"]')
    with pytest.raises(ConfigError, match="line 2.*not an object"):
        _read(path)
    path.write_text('{"text": ' + "[" * 100_000)
    with pytest.raises(ConfigError, match="line 1.*nested too deeply"):
        _read(path)


def test_a_missing_key_is_named_with_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"txet": "two", "id": 2}')
    with pytest.raises(ConfigError, match="line 2 has neither.*'txet', 'id'.*to 'txet'") as refusal:
        _read(tmp_path / "a.jsonl")
    assert refusal.value.field == f"{FIELD}.text_key"
    pq.write_table(pa.Table.from_pylist([{"content": "x"}]), tmp_path / "b.parquet")
    with pytest.raises(ConfigError, match="its keys: 'content'.*Set text_key to the key"):
        _read(tmp_path / "b.parquet")


def test_a_value_that_is_not_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": null}')
    with pytest.raises(ConfigError, match="line 2 is None, not text"):
        _read(tmp_path / "a.jsonl")
    rows = [{"text": number} for number in range(3)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "b.parquet")
    with pytest.raises(ConfigError, match="row 0 is 0, not text"):
        _read(tmp_path / "b.parquet")


def test_the_row_number_counts_over_row_groups(tmp_path: Path) -> None:
    rows = [{"text": "x"}] * 7 + [{"text": None}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=3)
    with pytest.raises(ConfigError, match="row 7 is None"):
        _read(tmp_path / "a.parquet", shard_bytes=1)


def test_a_file_that_is_no_parquet_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_text("no parquet at all")
    with pytest.raises(ConfigError, match="not a Parquet file"):
        _read(tmp_path / "a.parquet")


def test_files_that_go_or_shrink_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n{"text": "two"}\n')
    source = SourceSettings(path=str(path))
    (shard,) = plan_shards(list_files(source, FIELD), source, FIELD, 2**20)
    path.write_text('{"text": "one"}\n')
    with pytest.raises(WorkError, match="shrank"):
        list(read_documents(shard))
    path.unlink()
    with pytest.raises(WorkError, match="cannot read.*a.jsonl"):
        list(read_documents(shard))
