"""What is known of one tokenized source, kept beside it so that nobody counts again."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from shoal.data.indexed_tokens import IndexedTokens, mask_prefix, open_mask
from shoal.errors import WorkError

_NAME = "summary.json"
_CHUNK_BYTES = 2**22


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Counts and identity of one pair and its mask."""

    documents: int
    tokens: int

    labels: int
    """Tokens that can be predicted: not a document's first, and not masked."""

    smallest_id: int
    largest_id: int

    digest: str
    """Hash of the files' content."""

    @classmethod
    def of(cls, prefix: str | Path) -> Self:
        """Read the whole pair ``prefix``; WorkError if it is damaged."""
        tokens = IndexedTokens(prefix)
        tokens.check()
        mask = open_mask(tokens)
        smallest_id, largest_id = tokens.token_range() if len(tokens) else (0, 0)
        return cls(
            documents=tokens.num_documents,
            tokens=len(tokens),
            labels=tokens.count_labels(mask),
            smallest_id=smallest_id,
            largest_id=largest_id,
            digest=_digest(prefix),
        )

    def write(self, folder: Path) -> None:
        """Keep it in ``folder``; OSError if the disk refuses."""
        (folder / _NAME).write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read it from ``folder``; WorkError if it is missing or damaged."""
        path = folder / _NAME
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise WorkError(f"cannot read {path}: {error}") from error


def _digest(prefix: str | Path) -> str:
    content = hashlib.sha256()
    for part in (prefix, mask_prefix(prefix)):
        for path in (Path(f"{part}.idx"), Path(f"{part}.bin")):
            if path.exists():
                with path.open("rb") as stream:
                    while chunk := stream.read(_CHUNK_BYTES):
                        content.update(chunk)
    return content.hexdigest()
