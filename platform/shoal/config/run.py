"""Where a run lives and what its randomness starts from."""

from __future__ import annotations

from pydantic import Field

from shoal.config.section import Section


class RunSettings(Section):
    """``run``: the name, the folder and the seed of a run."""

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$")
    """Name of the run; ``dir/name`` is its folder."""

    dir: str = Field(default="runs", min_length=1)
    """Folder that holds the runs; all nodes must share it if there are several."""

    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of the initial weights, the data order and dropout."""
