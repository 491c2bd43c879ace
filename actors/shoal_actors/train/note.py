"""Events that whoever drives a run notes beside something that matters more."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from shoal.errors import WorkError
from shoal.training import EventKind, append_event

logger = logging.getLogger(__name__)


def note(folder: Path, kind: EventKind, /, **fields: Any) -> None:
    """Add an event to a run's folder; what a full disk, say, does not take is only logged."""
    try:
        append_event(folder, kind, **fields)
    except WorkError as error:
        logger.warning("%s", error)
