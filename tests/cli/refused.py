"""Runs ``shoal plan`` and ``shoal train`` on many files in one process that has no Ray yet.

Run as ``python -m tests.cli.refused FOLDER``; writes JSON: what each said of each file, and whether
any of them started Ray or left anything in the folder.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.cli.shell import shoal_here


def main(folder: Path) -> None:
    """Every YAML file of the folder."""
    import ray

    files = sorted(folder.glob("*.yaml"))
    said: dict[str, dict[str, tuple[int, str]]] = {}
    for file in files:
        ends = {c: shoal_here(c, file.name, cwd=folder) for c in ("plan", "train")}
        said[file.stem] = {c: (end.returncode, end.stderr) for c, end in ends.items()}
    left = sorted(path.name for path in folder.iterdir() if path not in files)
    sys.stdout.write(json.dumps({"said": said, "ray": ray.is_initialized(), "left": left}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
