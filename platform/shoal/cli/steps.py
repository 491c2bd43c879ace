"""Which step of a run an argument means."""

from __future__ import annotations

from pathlib import Path

from shoal.errors import ConfigError


def step_of(path: Path, argument: str) -> Path:
    """A step's folder: ``path`` itself, or the newest complete step of the run at ``path``.

    Raises ConfigError that names ``argument``.
    """
    from shoal.checkpoint import newest  # torch takes seconds to load

    if (path / "checkpoints").is_dir():
        found = newest(path / "checkpoints")
        if found is None:
            problem, remedy = "the run has no complete checkpoint", "Train it first"
            raise ConfigError(argument, str(path), problem, remedy)
        return found.path
    if not path.is_dir():
        remedy = "Give a step's folder, such as runs/run/checkpoints/step-00000010"
        raise ConfigError(argument, str(path), "there is no such folder", remedy)
    return path
