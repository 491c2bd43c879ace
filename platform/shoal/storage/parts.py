"""How the publisher of a save learns that every rank's file is written.

Each rank leaves a note in a folder of the save once its file is on the medium, or once it has
failed; the publisher looks for all notes. The medium is all that the writing processes share, so
this works wherever the checkpoint itself does.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

from shoal.errors import WorkError
from shoal.storage.files import FileRecord
from shoal.storage.location import Location
from shoal.storage.media import medium_of
from shoal.storage.medium import SAVE_FOLDER

logger = logging.getLogger(__name__)


def note_part(draft: Location, name: str, record: FileRecord) -> None:
    """Say that a rank's file is written."""
    _note(draft, name, {"record": asdict(record)})


def note_failure(draft: Location, name: str, error: str) -> None:
    """Say that a rank's file will not come, if the medium takes as much as that."""
    try:
        _note(draft, name, {"error": error})
    except OSError as refusal:  # the ranks themselves tell each other as well, at their next save
        logger.warning("%s: no note of a failure could be left: %s", draft, refusal)


def gather_parts(
    draft: Location, names: Sequence[str], between: Callable[[], None], patience_s: float
) -> dict[str, FileRecord]:
    """Wait for every rank's note; raises WorkError where one failed."""
    medium, folder = medium_of(draft), draft / SAVE_FOLDER
    deadline = time.monotonic() + patience_s
    records: dict[str, FileRecord] = {}
    while True:
        notes = medium.sizes(folder)
        for name in names:
            if name not in records and _note_name(name) in notes:
                records[name] = _read(folder / _note_name(name))
        if len(records) == len(names):
            return {name: records[name] for name in names}
        between()
        if time.monotonic() > deadline:
            missing = ", ".join(name for name in names if name not in records)
            raise WorkError(f"{draft}: {missing} did not come within {patience_s:g} s.")
        time.sleep(medium.look_s)


def await_begin(draft: Location, between: Callable[[], None], patience_s: float) -> None:
    """Wait until the publisher has made the folder of a save."""
    medium = medium_of(draft)
    deadline = time.monotonic() + patience_s
    while not medium.has_begun(draft):
        between()
        if time.monotonic() > deadline:
            raise WorkError(f"{draft} did not appear within {patience_s:g} s.")
        time.sleep(medium.look_s)


def _note(draft: Location, name: str, fields: dict[str, object]) -> None:
    note = draft / SAVE_FOLDER / _note_name(name)
    medium_of(note).put(note, json.dumps(fields).encode())


def _read(note: Location) -> FileRecord:
    fields = json.loads(medium_of(note).read(note))
    if "error" in fields:
        raise WorkError(fields["error"])
    return FileRecord(**fields["record"])


def _note_name(name: str) -> str:
    return f"{name}.note"
