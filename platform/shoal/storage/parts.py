"""How the publisher of a save learns that every rank's file is written.

Each rank leaves a note in the save's temporary folder once its file is on the disk, or once it has
failed; the publisher looks for all notes, and takes them away before it publishes. The folder is
all that the writing processes share, so this works wherever the checkpoint itself does.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from shoal.errors import WorkError
from shoal.storage.files import FileRecord

logger = logging.getLogger(__name__)

LOOK_S = 0.01
"""Seconds between two looks into the folder."""


def note_part(folder: Path, name: str, record: FileRecord) -> None:
    """Say that a rank's file is written."""
    _note(folder, name, {"record": asdict(record)})


def note_failure(folder: Path, name: str, error: str) -> None:
    """Say that a rank's file will not come, if the disk takes as much as that."""
    try:
        _note(folder, name, {"error": error})
    except OSError as refusal:  # the ranks themselves tell each other as well, at their next save
        logger.warning("%s: no note of a failure could be left: %s", folder, refusal)


def gather_parts(
    folder: Path, names: Sequence[str], between: Callable[[], None], patience_s: float
) -> dict[str, FileRecord]:
    """Wait for every rank's note and take the notes away; raises WorkError where one failed."""
    deadline = time.monotonic() + patience_s
    records: dict[str, FileRecord] = {}
    while True:
        for name in names:
            if name not in records:
                record = _read(folder / _note_name(name))
                if record is not None:
                    records[name] = record
        if len(records) == len(names):
            break
        between()
        if time.monotonic() > deadline:
            missing = ", ".join(name for name in names if name not in records)
            raise WorkError(f"{folder}: {missing} did not come within {patience_s:g} s.")
        time.sleep(LOOK_S)
    for name in names:
        (folder / _note_name(name)).unlink()
    return {name: records[name] for name in names}


def await_folder(folder: Path, between: Callable[[], None], patience_s: float) -> None:
    """Wait until the publisher has made the temporary folder."""
    deadline = time.monotonic() + patience_s
    while not folder.is_dir():
        between()
        if time.monotonic() > deadline:
            raise WorkError(f"{folder} did not appear within {patience_s:g} s.")
        time.sleep(LOOK_S)


def _note(folder: Path, name: str, fields: dict[str, object]) -> None:
    """Write a note under another name first: nobody may see half of it."""
    draft = folder / f"{_note_name(name)}.draft"
    draft.write_text(json.dumps(fields))
    os.replace(draft, folder / _note_name(name))


def _read(note: Path) -> FileRecord | None:
    try:
        fields = json.loads(note.read_text())
    except FileNotFoundError:
        return None
    if "error" in fields:
        raise WorkError(fields["error"])
    return FileRecord(**fields["record"])


def _note_name(name: str) -> str:
    return f"{name}.note"
