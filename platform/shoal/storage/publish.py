"""A step's way onto the disk: a temporary folder, then all at once its own name.

prepare   no such step yet, room on the disk, leftovers gone, temporary folder made
publish   what describes and what accompanies the ranks' files, manifest; flush, rename, flush
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from shoal.errors import WorkError
from shoal.storage.catalog import clean, hidden_name, new_token, step_name
from shoal.storage.files import FileRecord, flush_files, flush_folder, refusals, write_file
from shoal.storage.manifest import MANIFEST_NAME, Manifest, OptimizerRecord
from shoal.storage.verify import damages

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one save of one step is written."""

    folder: Path
    """The run's checkpoints."""

    step: int
    """Steps taken when it is saved."""

    token: str
    """Tells this save from any other of the same step."""

    @property
    def temporary(self) -> Path:
        """The folder while it is no published step."""
        return self.folder / hidden_name(self.step, "tmp", self.token)

    @property
    def final(self) -> Path:
        """The folder of the published step."""
        return self.folder / step_name(self.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What the publisher adds to the ranks' files."""

    files: Mapping[str, Path | bytes]
    """Contents, or files to copy, by path in the checkpoint's folder."""

    optimizer: OptimizerRecord | None
    """Unset where the model is saved alone."""

    def beside(self, files: Mapping[str, Path | bytes]) -> Contents:
        """The same and more files."""
        return replace(self, files={**self.files, **files})


def prepare(place: Place, num_bytes: int) -> None:
    """Make the temporary folder, after all that can be refused before a byte is written.

    ``num_bytes`` is what all ranks will write. Raises WorkError.
    """
    with refusals(place.folder):
        place.folder.mkdir(parents=True, exist_ok=True)
        if place.final.exists():
            _move_aside(place)
        clean(place.folder)
        room = shutil.disk_usage(place.folder)
        if room.total and room.free < num_bytes:
            raise WorkError(
                f"{place.folder} has no room for step {place.step}: it takes {num_bytes:,} bytes "
                f"and {room.free:,} are free. Free some, lower checkpoint.keep, or move run.dir."
            )
        place.temporary.mkdir()


def _move_aside(place: Place) -> None:
    problems = damages(place.final, step=place.step)
    if not problems:
        raise WorkError(f"{place.final} is a complete checkpoint already and is not written again.")
    aside = place.folder / hidden_name(place.step, "bad", new_token())
    logger.warning("%s is moved to %s: %s", place.final, aside, problems[0])
    place.final.rename(aside)


def publish(place: Place, shards: Mapping[str, FileRecord], contents: Contents) -> None:
    """Complete the folder and give it its name.

    ``shards`` are the ranks' files by name, all of them written. Raises WorkError.
    """
    temporary = place.temporary
    with refusals(place.final):
        files = {**shards, **_add(temporary, contents.files)}
        manifest = Manifest(
            step=place.step,
            world_size=len(shards),
            optimizer=contents.optimizer,
            files=dict(sorted(files.items())),
        )
        manifest.write(temporary)
        added = [temporary / name for name in (*contents.files, MANIFEST_NAME)]
        flush_files(added)
        for folder in {path.parent for path in added}:
            flush_folder(folder)
        problems = damages(temporary, step=place.step)
        if problems:
            raise WorkError(f"{problems[0]} right after it was written.")
        temporary.rename(place.final)
        flush_folder(place.folder)


def _add(temporary: Path, files: Mapping[str, Path | bytes]) -> dict[str, FileRecord]:
    records = {}
    for name, content in files.items():
        target = temporary / name
        target.parent.mkdir(parents=True, exist_ok=True)
        data = content if isinstance(content, bytes) else content.read_bytes()
        records[name] = write_file(target, data)
    return records
