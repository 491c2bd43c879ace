"""``shoal checkpoint``: looking after the steps of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.options import Overrides
from shoal.cli.steps import step_of
from shoal.config import load_config
from shoal.errors import ConfigError

app = typer.Typer(help="List, check and rewrite the checkpoints of a run.", no_args_is_help=True)

Folder = Annotated[
    Path, typer.Argument(metavar="PATH", help="A run's folder, its checkpoints folder, or a step.")
]


@app.command()
def ls(path: Folder) -> None:
    """List the steps with their state and size, in order."""
    steps = _steps_in(path)
    # torch takes seconds to load
    from shoal.checkpoint import Manifest
    from shoal.storage import damages

    for step in steps:
        if found := damages(step):
            typer.echo(f"{step}  damaged: {found[0]}")
        else:
            manifest = Manifest.read(step)
            size = f"{manifest.num_bytes:,} bytes"
            typer.echo(f"{step}  complete  {size}  saved by {manifest.world_size} ranks")


@app.command()
def verify(path: Folder) -> None:
    """Read every byte and compare it with its checksum; exit code 1 if anything is damaged."""
    steps = _steps_in(path)
    from shoal.checkpoint import verify as damages_of  # torch takes seconds to load

    damaged = False
    for step in steps:
        found = damages_of(step)
        damaged = damaged or bool(found)
        for damage in found:
            typer.echo(f"{step}  damaged: {damage}")
        if not found:
            typer.echo(f"{step}  whole")
    raise typer.Exit(1 if damaged else 0)


@app.command()
def reshard(
    source: Annotated[
        Path, typer.Argument(help="A step's folder, or a run's folder for its newest step.")
    ],
    out: Annotated[
        Path, typer.Argument(help="Folder of a run, such as runs/other; may be a new one.")
    ],
    config: Annotated[
        Path, typer.Option(metavar="CONFIG", help="YAML file of the run that is to go on from it.")
    ],
    overrides: Overrides = None,
) -> None:
    """Rewrite a step as the ranks of another layout would have saved it, without starting any.

    Any layout loads any checkpoint as it is; of a rewritten one each rank reads a single file. The
    bits stay, and are compared; memory does not grow with the model.
    """
    settings = load_config(config, overrides or ())
    step = step_of(source, "SOURCE")
    # torch takes seconds to load
    from shoal.checkpoint import RunFolder
    from shoal.checkpoint import reshard as rewrite
    from shoal.plan import held_by_rank

    held = held_by_rank(settings)
    folder = RunFolder(out)
    with folder.lock():
        made = rewrite(step, folder.checkpoints, held)
    typer.echo(f"Wrote {made} for {len(held)} ranks from {step}")


def _steps_in(path: Path) -> list[Path]:
    """The folders of the steps that ``path`` means; refuses a path without any."""
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    if not folder.is_dir():
        remedy = "Give a run's folder, such as runs/run"
        raise ConfigError("PATH", str(path), "there is no such folder", remedy)
    if folder.name.startswith("step-"):
        return [folder]
    found = sorted(entry for entry in folder.glob("step-*") if entry.is_dir())
    if not found:
        remedy = "Give a run's folder, such as runs/run"
        raise ConfigError("PATH", str(path), "it holds no checkpoints", remedy)
    return found
