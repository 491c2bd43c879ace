"""A table of a plan, and how its numbers are written."""

from __future__ import annotations

from dataclasses import dataclass

MOST_ROWS = 64
"""Ranks that are listed; the rest follows by its number."""

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """A titled table."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    numeric: frozenset[int]
    """Columns that hold numbers and stand at the right."""

    note: str = ""
    """A line below."""


def bytes_text(num_bytes: int) -> str:
    """``num_bytes`` with three significant digits, such as ``1.53 GiB``."""
    size, unit = float(num_bytes), 0
    while size >= 999.5 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    if unit == 0:
        return f"{num_bytes} B"
    digits = 2 if size < 9.995 else 1 if size < 99.95 else 0
    return f"{size:.{digits}f} {_UNITS[unit]}"


def seconds_text(seconds: float) -> str:
    """``seconds`` with three significant digits, such as ``1.53 ms``."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        size = seconds * factor
        if size >= 0.9995 or unit == "µs":
            break
    digits = 2 if size < 9.995 else 1 if size < 99.95 else 0
    return f"{size:.{digits}f} {unit}"
