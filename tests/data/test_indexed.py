"""Our reader and writer against Megatron's."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.data.indexed_tokens import IndexedTokens, mask_prefix, open_mask
from shoal.data.indexed_writer import IndexedWriter, megatron_indexed_dataset
from shoal.errors import WorkError


def _write(
    prefix: Path, documents: list[list[int]], masks: list[list[bool] | None] | None = None
) -> None:
    with IndexedWriter(prefix, 70_000) as writer:
        for number, tokens in enumerate(documents):
            writer.add(tokens, None if masks is None else masks[number])


@pytest.mark.parametrize("vocab_size", [257, 65_499, 65_500, 150_000])
def test_megatron_reads_what_we_write(tmp_path: Path, vocab_size: int) -> None:
    documents = [[0, 256, 3], [vocab_size - 1], list(range(50))]
    with IndexedWriter(tmp_path / "a", vocab_size) as writer:
        for document in documents:
            writer.add(document)
    theirs = megatron_indexed_dataset().IndexedDataset(str(tmp_path / "a"))
    assert [row.tolist() for row in theirs] == documents
    assert theirs.document_indices.tolist() == [0, 1, 2, 3]
    ours = IndexedTokens(tmp_path / "a")
    ours.check()
    assert ours.tokens.tolist() == sum(documents, [])
    assert ours.tokens.dtype == theirs.index.dtype
    assert ours.num_documents == 3
    assert ours.token_range() == (0, vocab_size - 1)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.uint16, np.int32, np.int64])
def test_we_read_what_megatron_writes(tmp_path: Path, dtype: Any) -> None:
    builder = megatron_indexed_dataset().IndexedDatasetBuilder(f"{tmp_path}/a.bin", dtype=dtype)
    builder.add_document(np.array([1, 2, 3, 4, 5]), [2, 3])  # a document of two sentences
    builder.add_document(np.array([], dtype=dtype), [0])
    builder.add_document(np.array([], dtype=dtype), [])  # not even a sentence
    builder.add_document(np.array([6, 7]), [2])
    builder.finalize(f"{tmp_path}/a.idx")
    ours = IndexedTokens(tmp_path / "a")
    ours.check()
    assert ours.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert ours.num_documents == 4
    for start in range(8):
        for stop in range(start, 8):
            assert ours.document_starts(start, stop).tolist() == [5] * (start < 5 < stop)
    assert ours.count_labels(None) == 4 + 1


def test_merging_is_writing_one_after_the_other(tmp_path: Path) -> None:
    documents = [[1, 2], [3], [4, 5, 6], [7]]
    masks: list[list[bool] | None] = [None, [True], [False, True, False], None]
    _write(tmp_path / "all", documents, masks)
    _write(tmp_path / "a", documents[:1])  # without a mask
    _write(tmp_path / "none", [])
    _write(tmp_path / "b", documents[1:3], masks[1:3])
    _write(tmp_path / "c", documents[3:])
    with IndexedWriter(tmp_path / "merged", 70_000) as writer:
        for name in ("a", "none", "b", "c"):
            writer.append(tmp_path / name)
    for prefix in ("", "_mask"):
        for ending in ("bin", "idx"):
            merged = (tmp_path / f"merged{prefix}.{ending}").read_bytes()
            assert merged == (tmp_path / f"all{prefix}.{ending}").read_bytes()
    tokens = IndexedTokens(tmp_path / "merged")
    mask = open_mask(tokens)
    assert mask is not None
    assert mask.tokens.tolist() == [1, 1, 1, 0, 1, 0, 1]
    assert tokens.count_labels(mask) == 2
    assert open_mask(IndexedTokens(tmp_path / "a")) is None


def test_an_empty_pair(tmp_path: Path) -> None:
    _write(tmp_path / "a", [])
    tokens = IndexedTokens(tmp_path / "a")
    tokens.check()
    assert (len(tokens), tokens.num_documents, tokens.count_labels(None)) == (0, 0, 0)


def test_an_error_leaves_no_index(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), IndexedWriter(tmp_path / "a", 257) as writer:
        writer.add([1, 2], [True, False])
        raise ZeroDivisionError
    assert not list(tmp_path.glob("*.idx"))


def _patch(path: Path, offset: int, content: bytes) -> None:
    data = bytearray(path.read_bytes())
    data[offset : offset + len(content)] = content
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda pair: pair("idx").unlink(), "a.idx does not exist"),
        (lambda pair: pair("bin").unlink(), "a.bin does not exist"),
        (lambda pair: pair("idx").write_bytes(b""), "cut short: its header has 0 bytes"),
        (lambda pair: _patch(pair("idx"), 0, b"NO"), "not an index of Megatron's format"),
        (lambda pair: _patch(pair("idx"), 9, b"\2"), "not an index of Megatron's format"),
        (lambda pair: _patch(pair("idx"), 17, b"\6"), "numbers of type 6"),
        (lambda pair: pair("idx").write_bytes(pair("idx").read_bytes()[:-1]), "idx is cut short"),
        (lambda pair: pair("bin").write_bytes(b"12"), "has 2 bytes where its index says 20"),
        (lambda pair: _patch(pair("idx"), 34, struct.pack("<i", 9)), "contradicts itself"),
        (lambda pair: _patch(pair("idx"), 34 + 3 * 12, b"\1"), "contradicts itself"),
        (lambda pair: _patch(pair("idx"), 34 + 3 * 12 + 8, b"\7"), "contradicts itself"),
    ],
)
def test_damage_is_found(tmp_path: Path, damage: Any, problem: str) -> None:
    _write(tmp_path / "a", [[1, 2], [3], [4, 5]])
    damage(lambda ending: tmp_path / f"a.{ending}")
    with pytest.raises(WorkError, match=problem):
        IndexedTokens(tmp_path / "a").check()


def test_a_mask_of_another_length_is_found(tmp_path: Path) -> None:
    _write(tmp_path / "a", [[1, 2], [3]])
    _write(mask_prefix(tmp_path / "a"), [[1]])
    with pytest.raises(WorkError, match="1 entries for 3 tokens"):
        open_mask(IndexedTokens(tmp_path / "a"))
