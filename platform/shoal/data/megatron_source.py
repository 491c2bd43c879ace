"""A source that is tokenized already: Megatron's ``.bin`` and ``.idx``, used where they lie."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from shoal.config import SourceSettings
from shoal.data.cache import cached
from shoal.data.indexed_tokens import IndexedTokens, mask_prefix, open_mask
from shoal.data.spec import TokenizedSource
from shoal.data.summary import Summary
from shoal.errors import ConfigError, WorkError


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronSource:
    """One pair; a pair ``PREFIX_mask`` beside it says which tokens may be labels."""

    settings: SourceSettings

    field: str
    """Its key, such as ``data.sources.0``."""

    prefix: str

    @classmethod
    def plan(cls, settings: SourceSettings, field: str, prefix: str) -> MegatronSource:
        """Look at the headers; ConfigError if the pair is missing or damaged."""
        source = cls(settings=settings, field=field, prefix=prefix)
        try:
            open_mask(IndexedTokens(prefix))
        except WorkError as error:
            raise source._refusal(str(error)) from error
        return source

    def prepare(self, cache: Path, vocab_size: int) -> TokenizedSource:
        """Read it through once, or take from ``cache`` what an earlier run saw.

        ConfigError if it is damaged or holds ids that a vocabulary of ``vocab_size`` lacks.
        """
        summary = cached(cache, self._key(), self._build, Summary.read)
        if not 0 <= summary.smallest_id <= summary.largest_id < vocab_size:
            raise ConfigError(
                f"{self.field}.path",
                self.settings.path,
                f"its token ids run from {summary.smallest_id} to {summary.largest_id}, and the "
                f"model's vocabulary has {vocab_size} entries",
                "Use the model that it was tokenized for, or raise the model's vocab_size",
            )
        return TokenizedSource.of(self.prefix, summary, self.settings, self.field)

    def _build(self, folder: Path) -> None:
        try:
            summary = Summary.of(self.prefix)
        except WorkError as error:
            raise self._refusal(str(error)) from error
        summary.write(folder)

    def _key(self) -> str:
        """Hash of names, sizes and times, by which a change is noticed."""
        parts = [
            (str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns)
            for prefix in (self.prefix, mask_prefix(self.prefix))
            for path in (Path(f"{prefix}.idx"), Path(f"{prefix}.bin"))
            if path.exists()
        ]
        return hashlib.sha256(repr(parts).encode("utf-8", "surrogateescape")).hexdigest()[:32]

    def _refusal(self, problem: str) -> ConfigError:
        return ConfigError(
            f"{self.field}.path",
            self.settings.path,
            problem,
            "Give the common prefix of a .bin and .idx pair that Megatron's tools wrote",
        )
