"""How much memory there is: the machine's, or what control groups leave of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.memory import available_bytes

GIB = 2**30
MEMINFO = f"MemTotal: {16 * 2**20} kB\nMemAvailable: {12 * 2**20} kB\n"


def v1(limit: int, used: int, cached: int = 0) -> dict[str, str]:
    return {
        "memory.limit_in_bytes": f"{limit}\n",
        "memory.usage_in_bytes": f"{used}\n",
        "memory.stat": f"inactive_file 1\ntotal_inactive_file {cached}\n",
    }


def v2(limit: int | str, used: int, cached: int = 0) -> dict[str, str]:
    return {
        "memory.max": f"{limit}\n",
        "memory.current": f"{used}\n",
        "memory.stat": f"anon 5\ninactive_file {cached}\n",
    }


@pytest.mark.parametrize(
    ("group", "files", "expected"),
    [
        ("0::/\n", {}, 12 * GIB),
        ("0::/\n", {"": v2(4 * GIB, GIB)}, 3 * GIB),
        ("0::/\n", {"": v2(4 * GIB, 3 * GIB, cached=2 * GIB)}, 3 * GIB),
        ("0::/\n", {"": v2(GIB, 2 * GIB)}, 0),
        ("0::/a/b\n", {"a/b": v2("max", GIB), "a": v2(2 * GIB, GIB)}, GIB),
        ("0::/a/b\n", {"a/b": v2(5 * GIB, GIB), "a": v2(64 * GIB, GIB)}, 4 * GIB),
        # Inside a container the path may be the host's, and the mount the container's own group.
        ("0::/kubepods/pod1\n", {"": v2(2 * GIB, 0)}, 2 * GIB),
        ("4:memory:/docker/7\n0::/\n", {"memory": v1(2 * GIB, GIB, cached=GIB)}, 2 * GIB),
        ("4:cpu,memory:/x\n", {"memory/x": v1(3 * GIB, GIB), "memory": v1(2**63, 0)}, 2 * GIB),
        ("4:memory:/x\n", {"memory/x": v1(2**63 - 4096, GIB)}, 12 * GIB),
        ("3:cpu:/x\n", {"memory/x": v1(GIB, 0)}, 12 * GIB),
    ],
)
def test_the_tightest_limit_counts(
    group: str, files: dict[str, dict[str, str]], expected: int, tmp_path: Path
) -> None:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text(MEMINFO)
    (tmp_path / "proc" / "self" / "cgroup").write_text(group)
    for folder, texts in files.items():
        (tmp_path / "sys/fs/cgroup" / folder).mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (tmp_path / "sys/fs/cgroup" / folder / name).write_text(text)
    assert available_bytes(tmp_path) == expected


def test_this_machine_has_some() -> None:
    assert available_bytes() > 0
