"""What whole weights are needed for."""

from __future__ import annotations

from enum import StrEnum


class Use(StrEnum):
    """The products that are about to be made; they differ where weights travel in MXFP8."""

    FORWARD = "forward"
    BACKWARD = "backward"

    RECOMPUTED = "recomputed"
    """Backward, with a forward in the middle of it."""
