"""A toy model with a real KV pool: what it computes goes through the blocks it was given.

A slot holds a digest of its token and of what the slot before it holds, as keys and values do in
effect. A token is read off the digest of the last position. So a wrong, stale or foreign block
anywhere changes what comes out, and ``expected_token`` says what should have.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from shoal.inference import Chunk, Step

_START = b"before the first token"


class ToyModel:
    """Computes steps of chunks over ``num_blocks`` blocks."""

    def __init__(self, num_blocks: int, block_size: int, vocab_size: int) -> None:
        self._slots: list[bytes] = [b"nothing yet"] * (num_blocks * block_size)
        self._block_size = block_size
        self._vocab_size = vocab_size

    def compute(self, step: Step) -> tuple[list[int], dict[str, list[tuple[int, bytes]]]]:
        """Tokens of ``step.sampled``, and by request the (position, digest) that were scored."""
        tokens = []
        scored: dict[str, list[tuple[int, bytes]]] = {}
        for chunk in step.chunks:
            for position, token in enumerate(chunk.tokens, chunk.start):
                self._write(chunk, position, token)
            if chunk.scored:
                scored[chunk.sequence.request.id] = [
                    (position, self._read(chunk, position)) for position in chunk.scored
                ]
            if chunk.samples:
                tokens.append(self._token(self._read(chunk, chunk.stop - 1)))
        return tokens, scored

    def holds(self, block: int, prefix: Sequence[int]) -> bool:
        """Whether ``block`` is full and holds the last tokens of ``prefix``."""
        size = self._block_size
        expected = self._digests(prefix)[-size:]
        return self._slots[block * size : (block + 1) * size] == expected

    def expected_token(self, prefix: Sequence[int]) -> int:
        """The token that follows ``prefix``."""
        return self._token(self.expected_digest(prefix))

    def expected_digest(self, prefix: Sequence[int]) -> bytes:
        """Digest at the last position of ``prefix``."""
        return self._digests(prefix)[-1]

    def _write(self, chunk: Chunk, position: int, token: int) -> None:
        before = _START if position == 0 else self._read(chunk, position - 1)
        self._slots[self._slot(chunk, position)] = _digest(before, token)

    def _read(self, chunk: Chunk, position: int) -> bytes:
        return self._slots[self._slot(chunk, position)]

    def _slot(self, chunk: Chunk, position: int) -> int:
        block, offset = divmod(position, self._block_size)
        return chunk.blocks[block] * self._block_size + offset

    def _digests(self, prefix: Sequence[int]) -> list[bytes]:
        digests = [_START]
        for token in prefix:
            digests.append(_digest(digests[-1], token))
        return digests[1:]

    def _token(self, digest: bytes) -> int:
        return digest[0] % self._vocab_size


def _digest(before: bytes, token: int) -> bytes:
    return hashlib.blake2b(before + token.to_bytes(8, "little"), digest_size=8).digest()
