"""What a rank needs to open the tokenized data: a small value that travels as it is."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor
from typing import Self

from shoal.config import SourceSettings
from shoal.data.summary import Summary
from shoal.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizedSource:
    """One source on disk."""

    prefix: str
    """Common path of its ``.bin`` and ``.idx``, and of the ``_mask`` pair if it has one."""

    num_tokens: int

    num_labels: int
    """Tokens that some sequence has as a label."""

    digest: str
    """Hash of the content, wherever it lies."""

    weight: float | None = None
    """Share of each epoch relative to the other sources; None: every sequence once."""

    @classmethod
    def of(cls, prefix: str, summary: Summary, settings: SourceSettings, field: str) -> Self:
        """Describe the pair ``prefix``; ConfigError on ``field`` if it holds nothing to learn."""
        if not summary.labels:
            raise ConfigError(
                f"{field}.path",
                settings.path,
                f"its {summary.documents} documents of {summary.tokens} tokens give nothing to "
                "predict: no document has two tokens of which the second may be a label",
                "Give longer documents, or chats in which the assistant speaks",
            )
        return cls(
            prefix=prefix,
            num_tokens=summary.tokens,
            num_labels=summary.labels,
            digest=summary.digest,
            weight=settings.weight,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetSpec:
    """Tokenized sources cut into sequences of ``seq_len`` tokens.

    Without weights an epoch is every sequence of every source once. With weights it is the shortest
    in which the sources have their shares and no sequence is left out: a source that comes short is
    repeated in order.
    """

    sources: tuple[TokenizedSource, ...]
    seq_len: int

    end_of_text: int
    """The token that fills up each source's last sequence."""

    @property
    def fingerprint(self) -> str:
        """Equal for two datasets only if their sequences are the same, number by number."""
        parts = [(source.digest, source.weight) for source in self.sources]
        content = repr((parts, self.seq_len, self.end_of_text))
        return hashlib.sha256(content.encode()).hexdigest()

    @property
    def num_labels(self) -> int:
        """Labels of all sources, each counted once."""
        return sum(source.num_labels for source in self.sources)

    @property
    def num_sequences(self) -> int:
        """Sequences of one epoch."""
        return sum(self.shares)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sequences that each source is cut into."""
        # The last token of a source is only ever a label.
        return tuple(ceil((source.num_tokens - 1) / self.seq_len) for source in self.sources)

    @property
    def shares(self) -> tuple[int, ...]:
        """Sequences of each source in one epoch, repetitions included."""
        weights = [Fraction(source.weight) for source in self.sources if source.weight is not None]
        if not weights:
            return self.sizes
        total = sum(weights)
        epoch = max(
            ceil(size * total / weight) for size, weight in zip(self.sizes, weights, strict=True)
        )
        return tuple(floor(epoch * weight / total + Fraction(1, 2)) for weight in weights)
