"""The pieces into which tokenization is cut: the same ones for any number of workers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow
import pyarrow.parquet

from shoal.config import SourceSettings
from shoal.data.document import Origin
from shoal.data.row import check_keys
from shoal.data.source import FileFormat, SourceFile
from shoal.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A part of one file."""

    path: str
    format: FileFormat

    start: int
    """First byte of JSONL and text, first row group of Parquet."""

    stop: int
    """End of the range, exclusive. A JSONL line belongs to the piece in which it starts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """Consecutive pieces of one source that one task tokenizes."""

    number: int
    """Position among the source's shards; documents keep this order."""

    pieces: tuple[Piece, ...]

    field: str
    """Key of the source in the configuration, such as ``data.sources.0``."""

    source: SourceSettings
    """Settings of the source: which keys hold the text and the messages."""


def plan_shards(
    files: Sequence[SourceFile],
    source: SourceSettings,
    field: str,
    shard_bytes: int,
) -> tuple[Shard, ...]:
    """Cut ``files`` into shards of about ``shard_bytes``, in order and without overlap.

    ConfigError on ``field`` if a Parquet file cannot be read or lacks the asked columns.
    """
    pieces = (piece for file in files for piece in _cut(file, source, field, shard_bytes))
    return tuple(
        Shard(
            number=number,
            pieces=group,
            field=field,
            source=source,
        )
        for number, group in enumerate(_group(pieces, shard_bytes))
    )


def _group(
    sized_pieces: Iterable[tuple[Piece, int]], shard_bytes: int
) -> Iterator[tuple[Piece, ...]]:
    """Join pieces until their bytes reach ``shard_bytes``."""
    group: list[Piece] = []
    filled = 0
    for piece, size in sized_pieces:
        group.append(piece)
        filled += size
        if filled >= shard_bytes:
            yield tuple(group)
            group, filled = [], 0
    if group:
        yield tuple(group)


def _cut(
    file: SourceFile, source: SourceSettings, field: str, shard_bytes: int
) -> Iterator[tuple[Piece, int]]:
    """Pieces of one file, each with its bytes on disk."""
    if file.format == "parquet":
        for number, size in enumerate(_row_groups(file, source, field)):
            yield Piece(path=file.path, format="parquet", start=number, stop=number + 1), size
        return
    # A text file is one document, so it is not cut.
    step = shard_bytes if file.format == "jsonl" else max(file.size, 1)
    for start in range(0, file.size, step):
        stop = min(start + step, file.size)
        yield Piece(path=file.path, format=file.format, start=start, stop=stop), stop - start


def _row_groups(file: SourceFile, source: SourceSettings, field: str) -> list[int]:
    """Bytes of each row group."""
    try:
        with pyarrow.parquet.ParquetFile(file.path) as parquet:
            check_keys(parquet.schema_arrow.names, source, field, Origin(path=file.path))
            metadata = parquet.metadata
            return [
                metadata.row_group(number).total_byte_size
                for number in range(metadata.num_row_groups)
            ]
    except pyarrow.ArrowInvalid as error:
        raise ConfigError(
            f"{field}.path", file.path, f"it is not a Parquet file: {error}", "Check the file"
        ) from error
