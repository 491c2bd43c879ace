"""Documents to Megatron's ``.bin`` and ``.idx``, shard by shard.

    plan_shards ──▶ shard 0 ─ tokenize_shard ─▶ pair 0 ──┐
                    shard 1 ─ tokenize_shard ─▶ pair 1 ──┼─ merge_shards ─▶ one pair
                    shard 2 ─ tokenize_shard ─▶ pair 2 ──┘

``tokenize_shard`` may run anywhere that sees the files and the output folder; the shards and their
order do not depend on who runs them, so the merged pair has the same bytes for any number of
workers.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from shoal.data.document import ChatDocument, Document
from shoal.data.indexed_tokens import mask_prefix
from shoal.data.indexed_writer import IndexedWriter
from shoal.data.reader import read_documents
from shoal.data.shard import Shard
from shoal.data.tokenizer import Tokenizer
from shoal.errors import ConfigError, WorkError


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenCounts:
    """What tokenizing some documents gave."""

    documents: int = 0
    tokens: int = 0

    labels: int = 0
    """Tokens that can be predicted: not a document's first, and not masked."""

    repaired: int = 0
    """Documents in which bytes that are not UTF-8 were replaced."""

    def __add__(self, other: TokenCounts) -> TokenCounts:
        return TokenCounts(
            documents=self.documents + other.documents,
            tokens=self.tokens + other.tokens,
            labels=self.labels + other.labels,
            repaired=self.repaired + other.repaired,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardResult:
    """Where a shard's pair lies, and what is in it."""

    prefix: str
    counts: TokenCounts


ShardFunction: TypeAlias = Callable[[Shard], ShardResult]

ShardRunner: TypeAlias = Callable[[ShardFunction, Sequence[Shard]], list[ShardResult]]
"""Calls the function on every shard and gives the results in the shards' order."""


def run_locally(function: ShardFunction, shards: Sequence[Shard]) -> list[ShardResult]:
    """Tokenize one shard after the other in this process."""
    return [function(shard) for shard in shards]


def tokenize_shard(shard: Shard, *, tokenizer: Tokenizer, folder: str) -> ShardResult:
    """Tokenize the documents of ``shard`` into a pair in ``folder``.

    ConfigError for a document that cannot be read or rendered, WorkError if the pair cannot be
    written.
    """
    prefix = Path(folder) / f"shard-{shard.number:06d}"
    counts = tokenize_documents(read_documents(shard), tokenizer, prefix, shard.field)
    return ShardResult(prefix=str(prefix), counts=counts)


def tokenize_documents(
    documents: Iterable[Document], tokenizer: Tokenizer, prefix: Path, field: str
) -> TokenCounts:
    """Tokenize ``documents`` into the pair ``prefix``, with a mask pair if there are chats.

    ``field`` is the source's key in the configuration. Raises as ``tokenize_shard`` does.
    """
    total = TokenCounts()
    try:
        with IndexedWriter(prefix, tokenizer.vocab_size) as writer:
            for document in documents:
                tokens, is_label = encode(document, tokenizer, field)
                writer.add(tokens, is_label)
                total += TokenCounts(
                    documents=1,
                    tokens=len(tokens),
                    labels=len(tokens) - 1 if is_label is None else sum(is_label[1:]),
                    repaired=int(document.is_repaired),
                )
    except OSError as error:
        raise WorkError(f"cannot write tokens to {prefix}.bin: {error}") from error
    return total


def encode(
    document: Document, tokenizer: Tokenizer, field: str
) -> tuple[list[int], list[bool] | None]:
    """Token ids of ``document`` and, for a chat, which may be labels.

    ConfigError on a key under ``field`` if it is a chat that cannot be rendered.
    """
    if not isinstance(document, ChatDocument):
        return tokenizer.encode_document(document.text), None
    try:
        chat = tokenizer.encode_chat(document.messages)
    except ConfigError as error:
        if error.field != "messages":
            raise
        raise ConfigError(
            f"{field}.messages_key", str(document.origin), error.problem, error.remedy
        ) from error
    return chat.tokens, chat.is_label


def merge_shards(results: Sequence[ShardResult], prefix: Path, tokenizer: Tokenizer) -> None:
    """Join the shards' pairs, in order, into the pair ``prefix`` and remove them.

    WorkError if it cannot be written.
    """
    # Megatron collects garbage for each pair, a quarter of a second in a process that has imported
    # it; frozen objects are not looked at.
    gc.freeze()
    try:
        with IndexedWriter(prefix, tokenizer.vocab_size) as writer:
            for result in results:
                writer.append(Path(result.prefix))
                for part in (result.prefix, mask_prefix(result.prefix)):
                    for ending in ("bin", "idx"):
                        Path(f"{part}.{ending}").unlink(missing_ok=True)
    except OSError as error:
        raise WorkError(f"cannot write tokens to {prefix}.bin: {error}") from error
    finally:
        gc.unfreeze()
