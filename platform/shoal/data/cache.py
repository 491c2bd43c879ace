"""Folders that appear whole or not at all.

A folder is written under a hidden name, flushed to disk, and renamed to its key. Whoever finds the
key finds all of it; two builders of one key write two hidden folders and the first rename wins.
What a killed builder left behind is removed once it is a day old.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from shoal.errors import WorkError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LEFTOVER_AGE_S = 24 * 3600.0


def cached(
    root: Path, key: str, build: Callable[[Path], None], open_folder: Callable[[Path], T]
) -> T:
    """Give what ``open_folder(root/key)`` gives, after ``build(folder)`` if nothing is there yet.

    A folder that ``open_folder`` finds damaged, by a WorkError, is built again once. WorkError if
    it cannot be written; nothing then stays behind. Other errors of ``build`` pass.
    """
    folder = root / key
    _ensure(folder, build)
    try:
        return open_folder(folder)
    except WorkError as damage:
        logger.warning("Building %s again: %s", folder, damage)
    _discard(folder)
    _ensure(folder, build)
    return open_folder(folder)


def _ensure(folder: Path, build: Callable[[Path], None]) -> None:
    if folder.is_dir():
        return
    partial = _hidden_name(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(folder.parent)
        partial.mkdir()
        build(partial)
        _flush(partial)
        _publish(partial, folder)
    except OSError as error:
        raise WorkError(f"cannot write tokenized data to {folder.parent}: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _discard(folder: Path) -> None:
    """Take a damaged folder out of the way, at once for everybody."""
    doomed = _hidden_name(folder)
    try:
        folder.rename(doomed)
    except FileNotFoundError:
        return  # another process was faster
    shutil.rmtree(doomed, ignore_errors=True)


def _hidden_name(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.partial")


def _publish(partial: Path, final: Path) -> None:
    try:
        partial.rename(final)
    except OSError:
        if not final.is_dir():
            raise
        logger.info("%s was built by another process meanwhile", final)
    _flush_entry(final.parent)


def _flush(folder: Path) -> None:
    """Put the content of ``folder`` on disk before its name says that it is there."""
    for path in folder.iterdir():
        _flush_entry(path)
    _flush_entry(folder)


def _flush_entry(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_leftovers(root: Path) -> None:
    for path in root.glob(".*.partial"):
        try:
            newest = max(entry.stat().st_mtime for entry in (path, *path.iterdir()))
        except FileNotFoundError:
            continue  # its builder lives: it has just renamed it, or a file in it
        if time.time() - newest > _LEFTOVER_AGE_S:
            logger.info("removing %s, left behind by an earlier run", path)
            shutil.rmtree(path, ignore_errors=True)
