"""A rank's own log in the run's folder, which may lie on a disk that is full."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class _RankLog(logging.FileHandler):
    """Drops what the disk does not take: what ends the run is told to the driver in any case.

    ``logging`` would print each error that it meets, and Ray has ``print`` log: of one line that is
    refused there would come hundreds.
    """

    def handleError(self, record: logging.LogRecord) -> None:
        """Called where a line was refused."""

    def close(self) -> None:
        """Give the file back, whether or not the disk takes the rest."""
        with suppress(OSError):
            super().close()


@contextmanager
def rank_log(path: Path) -> Iterator[None]:
    """Log this process to a file as well, and what ends the block by an exception."""
    path.parent.mkdir(exist_ok=True)
    handler = _RankLog(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    except Exception:
        root.exception("this rank failed")
        raise
    finally:
        root.removeHandler(handler)
        handler.close()
