"""Read the documents of a shard, in order.

Text is UTF-8; a byte-order mark at the start of a file is dropped, and bytes that are not UTF-8
become U+FFFD, which is counted and reported. Files and rows of no text at all are no documents.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from shoal.data.document import Document, Origin, TextDocument
from shoal.data.row import document_of
from shoal.data.shard import Piece, Shard
from shoal.errors import ConfigError, WorkError

_PARQUET_ROWS = 256
"""Rows decoded at a time; bounds memory where rows are long."""


def read_documents(shard: Shard) -> Iterator[Document]:
    """Yield the documents of ``shard``.

    ConfigError names the file with its line or row where a row cannot be read; WorkError if a file
    has gone, shrunk or cannot be opened.
    """
    readers = {"text": _read_text, "jsonl": _read_jsonl, "parquet": _read_parquet}
    for piece in shard.pieces:
        try:
            for document in readers[piece.format](piece, shard):
                if not isinstance(document, TextDocument) or document.text:
                    yield document
        except (OSError, pyarrow.ArrowException) as error:
            raise WorkError(f"cannot read {piece.path}: {error}") from error


def _read_text(piece: Piece, shard: Shard) -> Iterator[Document]:
    text, is_repaired = _decode(Path(piece.path).read_bytes())
    yield TextDocument(text=text, origin=Origin(path=piece.path), is_repaired=is_repaired)


def _read_jsonl(piece: Piece, shard: Shard) -> Iterator[Document]:
    with open(piece.path, "rb") as stream:
        if piece.start:
            # From one byte before: where that byte ends a line, the line that follows is ours.
            stream.seek(piece.start - 1)
            stream.readline()
        while (offset := stream.tell()) < piece.stop:
            line = stream.readline()
            if not line:
                raise WorkError(f"{piece.path} shrank while it was read; start again")
            text, is_repaired = _decode(line)
            if text.strip():
                origin = Origin(path=piece.path, offset=offset)
                row = _parse(text, shard.field, origin)
                yield document_of(row, shard.source, shard.field, origin, is_repaired=is_repaired)


def _read_parquet(piece: Piece, shard: Shard) -> Iterator[Document]:
    source = shard.source
    with pyarrow.parquet.ParquetFile(piece.path) as parquet:
        columns = {source.text_key, source.messages_key} & set(parquet.schema_arrow.names)
        number = sum(parquet.metadata.row_group(group).num_rows for group in range(piece.start))
        for batch in parquet.iter_batches(
            batch_size=_PARQUET_ROWS,
            row_groups=list(range(piece.start, piece.stop)),
            columns=sorted(columns),
            use_threads=False,  # a task has one processor; others tokenize beside it
        ):
            for row in batch.to_pylist():
                origin = Origin(path=piece.path, row=number)
                yield document_of(row, source, shard.field, origin)
                number += 1


def _decode(content: bytes) -> tuple[str, bool]:
    """Text of ``content``, and whether bytes that are not UTF-8 were replaced."""
    try:
        return content.decode("utf-8-sig"), False
    except UnicodeDecodeError:
        return content.decode("utf-8-sig", errors="replace"), True


def _parse(text: str, field: str, origin: Origin) -> dict[str, Any]:
    try:
        row = json.loads(text)
    except ValueError as error:
        raise ConfigError(
            f"{field}.path", str(origin), f"it is not JSON: {error}", "Mend or remove the line"
        ) from error
    except RecursionError:
        raise ConfigError(
            f"{field}.path", str(origin), "it is nested too deeply", "Mend or remove the line"
        ) from None
    if not isinstance(row, dict):
        raise ConfigError(
            f"{field}.path",
            str(origin),
            f"it holds {text.strip()!r:.80}, not an object",
            'Write one JSON object a line, such as {"text": "..."}',
        )
    return row
