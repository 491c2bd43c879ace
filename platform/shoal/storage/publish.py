"""A step's way onto a medium: a folder of a save under way, then all at once a step.

prepare   no such step yet, leftovers gone, room on the disk, folder made
publish   what describes and what accompanies the ranks' files, manifest, and it is a step
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

from shoal.errors import WorkError
from shoal.storage.catalog import clean
from shoal.storage.files import FileRecord, refusals, told, write_file
from shoal.storage.location import Location
from shoal.storage.manifest import Manifest, OptimizerRecord
from shoal.storage.media import medium_of, read_file
from shoal.storage.medium import MANIFEST_NAME, State, new_token
from shoal.storage.verify import damages, size_damages

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one save of one step is written."""

    folder: Location
    """The run's checkpoints."""

    step: int
    """Steps taken when it is saved."""

    token: str
    """Tells this save from any other of the same step."""

    @property
    def draft(self) -> Location:
        """The step's folder while the save is under way."""
        return medium_of(self.folder).draft(self.folder, self.step, self.token)

    @property
    def final(self) -> Location:
        """The folder of the published step."""
        return medium_of(self.folder).final(self.folder, self.step, self.token)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What the publisher adds to the ranks' files."""

    files: Mapping[str, Location | bytes]
    """Contents, or files to copy, by path in the checkpoint's folder."""

    optimizer: OptimizerRecord | None
    """Unset where the model is saved alone."""

    def beside(self, files: Mapping[str, Location | bytes]) -> Contents:
        """The same and more files."""
        return replace(self, files={**self.files, **files})


def prepare(place: Place, num_bytes: int) -> None:
    """Make the save's folder, after all that can be refused before a byte is written.

    ``num_bytes`` is what all ranks will write. Raises WorkError.
    """
    with refusals(place.folder):
        medium = medium_of(place.folder)
        _make_way(place)
        clean(place.folder)
        room = medium.room(place.folder)
        if room is not None and room < num_bytes:
            raise WorkError(
                f"{place.folder} has no room for step {place.step}: it takes {num_bytes:,} bytes "
                f"and {room:,} are free. Free some, lower checkpoint.keep, or move run.dir."
            )
        medium.begin(place.draft)


def _make_way(place: Place) -> None:
    """Refuse to write a complete step again, and have a damaged one set aside."""
    medium = medium_of(place.folder)
    for found in medium.step_folders(place.folder):
        if found.state is not State.PUBLISHED or found.number != place.step:
            continue
        problems = damages(found.path, step=place.step)
        if not problems:
            problem = "is a complete checkpoint already and is not written again"
            raise WorkError(f"{found.path} {problem}.")
        logger.warning("%s is set aside: %s", found.path, problems[0])
        medium.set_aside(found, new_token())


def publish(place: Place, shards: Mapping[str, FileRecord], contents: Contents) -> None:
    """Complete the folder and make a step of it.

    ``shards`` are the ranks' files by name, all of them written. Raises WorkError.
    """
    with refusals(place.final):
        files = {**shards, **_add(place.draft, contents.files)}
        problems = size_damages(place.draft, files)
        if problems:
            raise WorkError(f"{problems[0]} right after it was written.")
        manifest = Manifest(
            step=place.step,
            world_size=len(shards),
            optimizer=contents.optimizer,
            files=dict(sorted(files.items())),
        )
        manifest.write(place.draft)
        added = (*contents.files, MANIFEST_NAME)
        medium_of(place.folder).publish(place.draft, place.final, added)


def _add(draft: Location, files: Mapping[str, Location | bytes]) -> dict[str, FileRecord]:
    return {name: write_file(draft / name, _data(content)) for name, content in files.items()}


def _data(content: Location | bytes) -> bytes:
    """What to write; a file that is gone is told as such, not as one that cannot be written."""
    if isinstance(content, bytes):
        return content
    try:
        return read_file(content)
    except OSError as error:
        raise WorkError(f"{content} cannot be read: {told(error)}.") from error
