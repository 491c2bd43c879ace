"""What the model computes in one go."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.inference.scheduling.sequence import Sequence


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Consecutive known tokens of one sequence.

    The row of position p takes ``sequence.tokens[p]``, writes its keys and values into slot
    ``blocks[p // block_size] * block_size + p % block_size`` and attends to the positions 0 to p.
    """

    sequence: Sequence

    start: int
    """Position of the first row."""

    count: int
    """Rows, at least 1."""

    blocks: tuple[int, ...]
    """Blocks of the positions 0 to ``start + count - 1``."""

    samples: bool
    """Whether the last row's logits give the sequence's next token."""

    scored: range
    """Positions of this chunk whose logits give the log-probability of the prompt's next token:
    the row of position p scores the token at p + 1."""

    @property
    def stop(self) -> int:
        """Position after the last row."""
        return self.start + self.count

    @property
    def tokens(self) -> list[int]:
        """Token ids of the rows."""
        return self.sequence.tokens[self.start : self.stop]


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """The chunks of one step, in order.

    A chunk may attend to blocks that a chunk *before* it in the same step fills. So in each layer
    the keys and values of all rows are written before any row attends, or else the chunks are
    computed one after the other in this order.
    """

    number: int
    """Counted from 0."""

    chunks: tuple[Chunk, ...]
    """Empty only if there is nothing to do."""

    @property
    def num_tokens(self) -> int:
        """Rows of all chunks."""
        return sum(chunk.count for chunk in self.chunks)

    @property
    def sampled(self) -> tuple[Chunk, ...]:
        """The chunks that give a token, in order."""
        return tuple(chunk for chunk in self.chunks if chunk.samples)
