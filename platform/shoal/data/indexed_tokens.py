"""Read Megatron's ``.bin`` and ``.idx`` pair through memory maps.

The format, version 1, little-endian. The index is

    9 bytes   b"MMIDIDX\\0\\0"
    uint64    version, 1
    uint8     token type: 1 uint8, 2 int8, 3 int16, 4 int32, 5 int64, 8 uint16
    uint64    number of sequences n
    uint64    number of document bounds d, documents plus one
    int32[n]  tokens of each sequence
    int64[n]  byte at which each sequence starts in the .bin file
    int64[d]  number of the sequence at which each document starts, and n

and the ``.bin`` file is the tokens and nothing else. Megatron's own reader gives the same arrays
(a test compares them); this one exists because ranks open data each time they start, and to import
Megatron for it would cost each of them seconds and its torch state.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.errors import WorkError

_MAGIC = b"MMIDIDX\0\0"
_HEADER = struct.Struct("<9sQBQQ")
_TYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.int8),
    3: np.dtype(np.int16),
    4: np.dtype(np.int32),
    5: np.dtype(np.int64),
    8: np.dtype(np.uint16),
}
_CHUNK = 2**22


def mask_prefix(prefix: str | Path) -> Path:
    """Prefix of the pair that says which tokens of the pair ``prefix`` may be labels."""
    return Path(f"{prefix}_mask")


class IndexedTokens:
    """The tokens of one pair as one array, with where documents start.

    Opening reads the header only; pages of the files are read as they are touched. WorkError if a
    file is missing, is not of this format, or has another size than the index says.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = str(prefix)
        index_path, tokens_path = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
        for path in (index_path, tokens_path):
            if not path.is_file():
                raise WorkError(f"{path} does not exist")
        dtype, num_sequences, num_bounds = self._read_header(index_path)
        index = np.memmap(index_path, mode="r", dtype=np.uint8)
        ends = np.cumsum([_HEADER.size, 4 * num_sequences, 8 * num_sequences, 8 * num_bounds])
        if len(index) < ends[-1]:
            raise WorkError(f"{index_path} is cut short: {len(index)} of {ends[-1]} bytes")
        self._lengths = index[ends[0] : ends[1]].view(np.int32)
        self._starts = index[ends[1] : ends[2]].view(np.int64)
        self._bounds = index[ends[2] : ends[3]].view(np.int64)
        size = tokens_path.stat().st_size
        due = (
            int(self._starts[-1]) + int(self._lengths[-1]) * dtype.itemsize if num_sequences else 0
        )
        if size != due:
            raise WorkError(f"{tokens_path} has {size} bytes where its index says {due}")
        # An empty file cannot be mapped.
        self.tokens: npt.NDArray[np.integer] = (
            np.memmap(tokens_path, mode="r", dtype=dtype) if size else np.empty(0, dtype)
        )

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.tokens)

    @property
    def num_documents(self) -> int:
        """Number of documents, empty ones included."""
        return len(self._bounds) - 1

    def document_starts(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Positions strictly inside [start, stop) at which a document starts.

        Two binary searches over the mapped index; numpy's own would first copy the array, because
        the header leaves it unaligned.
        """
        width = self.tokens.itemsize
        here = bisect_right(self._starts, start * width) - 1
        beyond = bisect_left(self._starts, stop * width)
        first = bisect_right(self._bounds, here)
        last = bisect_left(self._bounds, beyond)
        sequences = self._bounds[first:last]
        return np.unique(self._starts[sequences] // width)

    def check(self) -> None:
        """Check the whole index, as the tokens of a stranger need; WorkError if it is damaged."""
        ends = self._starts + self._lengths.astype(np.int64) * self.tokens.itemsize
        bounds = self._bounds
        is_whole = (
            (
                not len(ends)
                or (self._starts[0] == 0 and bool((self._starts[1:] == ends[:-1]).all()))
            )
            and bool((self._lengths >= 0).all())
            and len(bounds) > 0
            and bounds[0] == 0
            and bounds[-1] == len(ends)
            and bool((np.diff(bounds) >= 0).all())
        )
        if not is_whole:
            raise WorkError(f"{self.prefix}.idx contradicts itself; write it again")

    def token_range(self) -> tuple[int, int]:
        """Smallest and largest token id of at least one; reads the whole file."""
        starts = range(0, len(self.tokens), _CHUNK)
        chunks = [self.tokens[start : start + _CHUNK] for start in starts]
        return min(int(part.min()) for part in chunks), max(int(part.max()) for part in chunks)

    def count_labels(self, mask: IndexedTokens | None) -> int:
        """Tokens that follow another one of their document and that ``mask`` lets be labels."""
        starts = self.document_starts(0, len(self))
        if mask is None:
            return max(len(self) - 1 - len(starts), 0)
        flags = mask.tokens
        return int(np.count_nonzero(flags[1:]) - np.count_nonzero(flags[starts]))

    @staticmethod
    def _read_header(path: Path) -> tuple[np.dtype[Any], int, int]:
        with path.open("rb") as stream:
            header = stream.read(_HEADER.size)
        if len(header) < _HEADER.size:
            raise WorkError(f"{path} is cut short: its header has {len(header)} bytes")
        magic, version, code, num_sequences, num_bounds = _HEADER.unpack(header)
        if magic != _MAGIC or version != 1:
            raise WorkError(f"{path} is not an index of Megatron's format, version 1")
        if code not in _TYPES:
            raise WorkError(f"{path} holds numbers of type {code}, which are no token ids")
        return _TYPES[code], num_sequences, num_bounds


def open_mask(tokens: IndexedTokens) -> IndexedTokens | None:
    """Open the mask pair beside ``tokens``; None if there is none, WorkError if it is damaged."""
    prefix = mask_prefix(tokens.prefix)
    if not Path(f"{prefix}.idx").exists():
        return None
    mask = IndexedTokens(prefix)
    if len(mask) != len(tokens):
        raise WorkError(f"{prefix}.bin has {len(mask)} entries for {len(tokens)} tokens")
    return mask
