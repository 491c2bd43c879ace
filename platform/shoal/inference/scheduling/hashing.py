"""Names of KV blocks by their content.

A full block is named by the SHA-256 of its parent's name and its own tokens, so a name stands for
all tokens from the start of the prompt on. The first block's parent is the root.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

ROOT_HASH = hashlib.sha256(b"shoal kv 0").digest()
"""Parent of first blocks."""


def child_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Name, 32 bytes, of the full block of ``tokens`` after the block ``parent``, or the root."""
    return hashlib.sha256(parent + np.asarray(tokens, dtype="<i8").tobytes()).digest()


def block_hashes(tokens: Sequence[int], block_size: int) -> list[bytes]:
    """Names of the full blocks of ``tokens``; the rest that fills no block has none."""
    names: list[bytes] = []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        parent = names[-1] if names else ROOT_HASH
        names.append(child_hash(parent, tokens[start : start + block_size]))
    return names
