"""A source of text, JSONL or Parquet, tokenized into the cache."""

from __future__ import annotations

import hashlib
import logging
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from shoal.config import SourceSettings
from shoal.data.cache import cached
from shoal.data.indexed_tokens import IndexedTokens, open_mask
from shoal.data.reader import read_documents
from shoal.data.shard import Shard, plan_shards
from shoal.data.source import SourceFile, list_files
from shoal.data.spec import TokenizedSource
from shoal.data.summary import Summary
from shoal.data.tokenize import ShardRunner, TokenCounts, encode, merge_shards, tokenize_shard
from shoal.data.tokenizer import Tokenizer
from shoal.errors import ConfigError, WorkError

logger = logging.getLogger(__name__)

_PAIR = "tokens"

_FORMAT = 1
"""Raised when the same input comes to give other tokens or other files than before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RawSource:
    """One source, its files listed and cut into shards."""

    settings: SourceSettings

    field: str
    """Its key, such as ``data.sources.0``."""

    files: tuple[SourceFile, ...]
    shards: tuple[Shard, ...]

    @classmethod
    def plan(
        cls, settings: SourceSettings, field: str, tokenizer: Tokenizer, shard_bytes: int
    ) -> RawSource:
        """List the files and try the first document; ConfigError if that cannot work."""
        files = list_files(settings, field)
        shards = plan_shards(files, settings, field, shard_bytes)
        first = next((document for shard in shards for document in read_documents(shard)), None)
        if first is None:
            raise ConfigError(
                f"{field}.path",
                settings.path,
                "it holds no document",
                "Give a file or folder with something to learn from",
            )
        encode(first, tokenizer, field)
        return cls(settings=settings, field=field, files=files, shards=shards)

    def prepare(
        self, tokenizer: Tokenizer, cache: Path, run_shards: ShardRunner
    ) -> TokenizedSource:
        """Tokenize into ``cache`` unless it is there; raises as ``shoal.data.prepare``."""
        build = partial(self._build, tokenizer=tokenizer, run_shards=run_shards)
        return cached(cache, self._key(tokenizer), build, self._open)

    def _key(self, tokenizer: Tokenizer) -> str:
        keys = (self.settings.text_key, self.settings.messages_key)
        content = repr((_FORMAT, tokenizer.fingerprint, keys, self.files))
        return hashlib.sha256(content.encode("utf-8", "surrogateescape")).hexdigest()[:32]

    def _build(self, folder: Path, tokenizer: Tokenizer, run_shards: ShardRunner) -> None:
        started = time.monotonic()
        logger.info(
            "Tokenizing %s (files: %d, MiB: %.1f, shards: %d)",
            self.settings.path,
            len(self.files),
            sum(file.size for file in self.files) / 2**20,
            len(self.shards),
        )
        function = partial(tokenize_shard, tokenizer=tokenizer, folder=str(folder))
        results = run_shards(function, self.shards)
        prefix = folder / _PAIR
        merge_shards(results, prefix, tokenizer)
        counts = sum((result.counts for result in results), TokenCounts())
        Summary.of(prefix).write(folder)
        logger.info(
            "Tokenized %s in %.1f s (documents: %d, tokens: %d)",
            self.settings.path,
            time.monotonic() - started,
            counts.documents,
            counts.tokens,
        )
        if counts.repaired:
            logger.warning(
                "%d documents of %s are not UTF-8; their damaged bytes became U+FFFD",
                counts.repaired,
                self.settings.path,
            )

    def _open(self, folder: Path) -> TokenizedSource:
        """Take what ``folder`` holds; WorkError if it is damaged."""
        summary = Summary.read(folder)
        prefix = folder / _PAIR
        tokens = IndexedTokens(prefix)
        open_mask(tokens)
        if len(tokens) != summary.tokens:
            raise WorkError(f"{prefix}.bin has {len(tokens)} tokens, not {summary.tokens}")
        return TokenizedSource.of(str(prefix), summary, self.settings, self.field)
