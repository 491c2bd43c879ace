"""Memory that this process may still take: the machine's, or less where a control group says so.

/proc/meminfo tells of the machine, also inside a container. What the container may use stands in
the files of its control group and of those around it (kernel.org, admin-guide/cgroup-v2.html and
cgroup-v1/memory.html).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True, kw_only=True, slots=True)
class _Version:
    """Where one version of control groups keeps its figures."""

    mount: str
    limit: str
    used: str
    reclaimable: str
    """Line of ``memory.stat``: pages of files, which the kernel gives back before it fails."""


_V1 = _Version(
    mount="sys/fs/cgroup/memory",
    limit="memory.limit_in_bytes",
    used="memory.usage_in_bytes",
    reclaimable="total_inactive_file",
)
_V2 = _Version(
    mount="sys/fs/cgroup",
    limit="memory.max",
    used="memory.current",
    reclaimable="inactive_file",
)


def available_bytes(root: Path = Path("/")) -> int:
    """Bytes that this process may still take; ``root`` is where ``proc`` and ``sys`` lie."""
    try:
        machine = int(_fields(root / "proc" / "meminfo")["MemAvailable:"]) * 1024
    except FileNotFoundError:  # not Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(0, min([machine, *_left_in_groups(root)]))


def _left_in_groups(root: Path) -> Iterator[int]:
    """What each control group with a limit has left: this process's own, and those around it."""
    for version, group in _groups(root):
        # A container often sees its own group as the root of the mount, under another path.
        for path in (group, *group.parents):
            folder = root / version.mount / path.relative_to("/")
            try:
                limit = (folder / version.limit).read_text(encoding="ascii").strip()
                used = int((folder / version.used).read_text(encoding="ascii"))
                cached = int(_fields(folder / "memory.stat")[version.reclaimable])
            except FileNotFoundError:
                continue
            if limit != "max":
                yield int(limit) - (used - cached)


def _groups(root: Path) -> Iterator[tuple[_Version, PurePosixPath]]:
    for line in (root / "proc" / "self" / "cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield _V2, PurePosixPath(path)
        elif "memory" in controllers.split(","):
            yield _V1, PurePosixPath(path)


def _fields(path: Path) -> dict[str, str]:
    """The first two words of each line."""
    lines = (line.split() for line in path.read_text(encoding="ascii").splitlines())
    return {words[0]: words[1] for words in lines if len(words) > 1}
