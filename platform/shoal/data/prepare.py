"""From ``data`` in the configuration to tokenized sources on disk: once a run, on the driver.

Every source is listed and its first document tried before any is tokenized, so that a mistake in
the last one does not wait for the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from shoal.config import DataSettings, SourceSettings
from shoal.data.megatron_source import MegatronSource
from shoal.data.raw_source import RawSource
from shoal.data.source import megatron_prefix
from shoal.data.spec import DatasetSpec, TokenizedSource
from shoal.data.tokenize import ShardRunner, run_locally
from shoal.data.tokenizer import Tokenizer, check_vocabulary
from shoal.errors import ConfigError, ConfigErrors

SHARD_BYTES = 8 * 2**20
"""Seconds of work for one task, and little beside its memory."""


def prepare(
    settings: DataSettings,
    tokenizer: Tokenizer,
    cache: Path,
    *,
    vocab_size: int | None = None,
    run_shards: ShardRunner = run_locally,
    shard_bytes: int = SHARD_BYTES,
) -> DatasetSpec:
    """Tokenize what ``cache`` does not hold yet and give what ranks need to open the data.

    ``vocab_size``: entries of the model's vocabulary, by default the tokenizer's. ``run_shards``
    calls the function that tokenizes one shard on all of them, for example as Ray tasks; every
    process it uses must see the sources and ``cache`` at the same paths. ``shard_bytes``: about how
    much input one call takes, which changes nothing about what comes out. ConfigError for a source
    that is missing, empty, unreadable as its format, has nothing to learn or ids beyond the
    vocabulary; WorkError if the disk fails.
    """
    entries = tokenizer.vocab_size if vocab_size is None else vocab_size
    check_vocabulary(tokenizer, entries)
    sources = plan_sources(settings, tokenizer, shard_bytes)
    tokenized: list[TokenizedSource] = [
        source.prepare(tokenizer, cache, run_shards)
        if isinstance(source, RawSource)
        else source.prepare(cache, entries)
        for source in sources
    ]
    return DatasetSpec(
        sources=tuple(tokenized), seq_len=settings.seq_len, end_of_text=tokenizer.end_of_text
    )


def plan_sources(
    settings: DataSettings, tokenizer: Tokenizer, shard_bytes: int = SHARD_BYTES
) -> list[RawSource | MegatronSource]:
    """List the files of every source and try its first document, without writing anything.

    ConfigError with whatever speaks against any of the sources.
    """
    found = list(_mixed_weights(settings))
    sources: list[RawSource | MegatronSource] = []
    for number, source in enumerate(settings.sources):
        try:
            sources.append(_plan_source(source, f"data.sources.{number}", tokenizer, shard_bytes))
        except ConfigError as error:
            found.append(error)
    ConfigErrors.raise_any(found)
    return sources


def _plan_source(
    source: SourceSettings, field: str, tokenizer: Tokenizer, shard_bytes: int
) -> RawSource | MegatronSource:
    prefix = megatron_prefix(source)
    if prefix is None:
        return RawSource.plan(source, field, tokenizer, shard_bytes)
    return MegatronSource.plan(source, field, prefix)


def _mixed_weights(settings: DataSettings) -> Iterator[ConfigError]:
    without = [number for number, source in enumerate(settings.sources) if source.weight is None]
    if without and len(without) < len(settings.sources):
        yield ConfigError(
            f"data.sources.{without[0]}.weight",
            None,
            "other sources have a weight and this one has none",
            "Give every source a weight, or none",
        )
