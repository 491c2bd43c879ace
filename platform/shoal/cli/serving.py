"""Options that the commands around a served model share, and how they become settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from shoal.errors import ConfigError

ModelFolder = Annotated[
    Path, typer.Argument(metavar="MODEL", help="Folder of a Hugging Face model.")
]
PrecisionOption = Annotated[
    Literal["auto", "fp32", "bf16", "mxfp8"],
    typer.Option(help="Format of weights and products, as serve.precision."),
]
ThreadsOption = Annotated[
    int | None, typer.Option(help="CPU threads; unset: as many as torch takes.", min=1)
]


_REMEDY = "Give the folder of a Hugging Face model"


def check_folder(folder: Path) -> None:
    """Refuse what is no folder of a model, before anything slow is imported."""
    if not folder.is_dir():
        raise ConfigError(
            "MODEL",
            str(folder),
            "there is no such folder",
            f"{_REMEDY}; shoal import and shoal export write such",
        )
    if not (folder / "config.json").exists():
        raise ConfigError(
            "MODEL",
            str(folder),
            "there is no config.json in this folder",
            f"{_REMEDY}; shoal export makes one of a run",
        )


def say_loading(folder: Path) -> None:
    """Say on stderr what happens for as long as nothing else is shown."""
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    typer.echo(f"Loading {folder}, {size / 2**20:,.0f} MiB of weights", err=True)


def use_threads(threads: int | None) -> None:
    """Compute on so many threads; None leaves torch's own choice."""
    import torch  # takes seconds to load

    if threads is not None:
        torch.set_num_threads(threads)
