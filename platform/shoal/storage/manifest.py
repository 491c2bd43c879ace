"""The manifest: what a complete checkpoint's folder must hold, itself under a checksum.

It is the last file written before a checkpoint is published, and holds the checksums of every
block of every file. ``checksum`` is the SHA-256 of the other fields as canonical JSON, so that a
flipped byte in the manifest is found as well.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from shoal.errors import WorkError
from shoal.storage.files import BLOCK_BYTES, FileRecord, unreadable, write_file
from shoal.storage.location import Location
from shoal.storage.media import read_file
from shoal.storage.medium import MANIFEST_NAME

FORMAT = "shoal-checkpoint"
VERSION = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerRecord:
    """The optimizer that was saved."""

    kind: str
    """Its class."""

    stateless: tuple[str, ...]
    """Parameters that it held without any state, sorted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One checkpoint."""

    step: int
    """Steps taken when it was saved."""

    world_size: int
    """Ranks that saved it."""

    optimizer: OptimizerRecord | None
    """Unset where the model was saved alone."""

    files: Mapping[str, FileRecord]
    """Every file of the folder but the manifest, by its path in the folder, sorted."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(record.num_bytes for record in self.files.values())

    def write(self, folder: Location) -> None:
        """Write it into a checkpoint's folder; raises WorkError where the disk refuses."""
        fields = {
            "format": FORMAT,
            "version": VERSION,
            "block_bytes": BLOCK_BYTES,
            **asdict(self),
        }
        text = json.dumps({**fields, "checksum": _checksum(fields)}, indent=1)
        write_file(folder / MANIFEST_NAME, text.encode() + b"\n")

    @classmethod
    def read(cls, folder: Location) -> Manifest:
        """Read it from a checkpoint's folder.

        Raises WorkError that names the file where it is missing, cut, changed, or of a version
        that this release does not know, and Unavailable where it may be whole.
        """
        path = folder / MANIFEST_NAME
        try:
            fields = json.loads(read_file(path))
        except OSError as error:
            raise WorkError(f"{path} {unreadable(path, error)}.") from error
        except (ValueError, RecursionError) as error:
            raise WorkError(f"{path} is cut or damaged: {error}.") from error
        if not isinstance(fields, dict) or fields.get("format") != FORMAT:
            raise WorkError(f"{path} is no manifest of a Shoal checkpoint.")
        if fields.get("version") != VERSION:
            raise WorkError(
                f"{path} has version {fields.get('version')!r} and this release reads version "
                f"{VERSION}. Load it with the release that wrote it."
            )
        if fields.pop("checksum", None) != _checksum(fields):
            raise WorkError(f"{path} is damaged: it does not match its own checksum.")
        optimizer = fields["optimizer"]
        files = {name: FileRecord(**record) for name, record in fields["files"].items()}
        if fields["block_bytes"] != BLOCK_BYTES or not all(f.is_consistent for f in files.values()):
            raise WorkError(f"{path} has checksums of blocks that this release does not know.")
        return cls(
            step=fields["step"],
            world_size=fields["world_size"],
            optimizer=optimizer
            and OptimizerRecord(kind=optimizer["kind"], stateless=tuple(optimizer["stateless"])),
            files=files,
        )


def _checksum(fields: Mapping[str, object]) -> str:
    canonical = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
