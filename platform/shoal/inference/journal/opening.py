"""From ``serve.journal`` to an engine's journal."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from shoal.config import JournalSettings
from shoal.errors import ConfigError
from shoal.inference.journal.journal import Journal
from shoal.inference.journal.segments import Segments


def journal_folder(settings: JournalSettings, place: int) -> Path:
    """The folder of the engine at ``place``, made if need be; ConfigError where it cannot be."""
    assert settings.dir is not None
    folder = Path(settings.dir).absolute() / f"engine-{place}"
    problem = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = error.strerror
    if problem is None and not os.access(folder, os.W_OK | os.X_OK):
        problem = "it may not be written to"
    if problem is not None:
        raise ConfigError(
            "serve.journal.dir",
            settings.dir,
            f"its folder {folder.name} cannot be used: {problem}",
            "Give a folder that the engines may write to",
        )
    return folder


def open_journal(
    settings: JournalSettings,
    place: int,
    *,
    facts: Mapping[str, str],
    progressed: Callable[[], None] = lambda: None,
) -> Journal:
    """The journal of the engine at ``place``, not yet started; see ``Journal`` and ``Segments``.

    Raises ConfigError as ``journal_folder`` does.
    """
    folder = journal_folder(settings, place)
    segments = Segments(
        folder,
        segment_bytes=settings.segment_bytes,
        keep_bytes=settings.keep_bytes,
        facts=facts,
    )
    return Journal(settings, segments, progressed=progressed)
