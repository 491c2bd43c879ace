"""``shoal checkpoint``: looking after the steps of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.options import Overrides, StepArgument
from shoal.cli.steps import answers, step_of, steps_of
from shoal.config import load_config
from shoal.storage import Manifest, damages, is_pinned, location_of, pin, unpin
from shoal.storage import verify as damages_of

app = typer.Typer(
    help="List, check, keep and rewrite the checkpoints of a run.", no_args_is_help=True
)

Steps = Annotated[
    str,
    typer.Argument(
        metavar="PATH", help="A run's folder, the folder or URI of its checkpoints, or a step."
    ),
]


@app.command()
def ls(path: Steps) -> None:
    """List the steps with their state and size, in order."""
    for step in steps_of(path, "PATH"):
        if found := damages(step):
            typer.echo(f"{step}  damaged: {found[0]}")
        else:
            manifest = Manifest.read(step)
            size = f"{manifest.num_bytes:,} bytes"
            with answers(step):
                pinned = "  pinned" if is_pinned(step) else ""
            ranks = "1 rank" if manifest.world_size == 1 else f"{manifest.world_size} ranks"
            typer.echo(f"{step}  complete  {size}  saved by {ranks}{pinned}")


@app.command()
def verify(path: Steps) -> None:
    """Read every byte and compare it with its checksum; exit code 1 if anything is damaged."""
    damaged = False
    for step in steps_of(path, "PATH"):
        found = damages_of(step)
        damaged = damaged or bool(found)
        for damage in found:
            typer.echo(f"{step}  damaged: {damage}")
        if not found:
            typer.echo(f"{step}  whole")
    raise typer.Exit(1 if damaged else 0)


@app.command(name="pin")
def pin_step(step: StepArgument) -> None:
    """Keep a step, whatever checkpoint.keep says."""
    found = step_of(step, "STEP")
    with answers(found):
        pin(found)
    typer.echo(f"{found}  pinned")


@app.command(name="unpin")
def unpin_step(step: StepArgument) -> None:
    """Let checkpoint.keep decide about a step again."""
    found = step_of(step, "STEP")
    with answers(found):
        unpin(found)
    typer.echo(f"{found}  not pinned")


@app.command()
def reshard(
    source: StepArgument,
    out: Annotated[
        str, typer.Argument(help="Folder of a run, such as runs/other, or its URI; may be new.")
    ],
    config: Annotated[
        Path, typer.Option(metavar="CONFIG", help="YAML file of the run that will go on from it.")
    ],
    overrides: Overrides = None,
) -> None:
    """Rewrite a step as the ranks of another layout would have saved it, without starting any.

    Any layout loads any checkpoint as it is; from a rewritten one each rank reads a single file.
    The bits stay the same, which is checked; memory does not grow with the model.
    """
    settings = load_config(config, overrides or ())
    step = step_of(source, "SOURCE")
    # torch takes seconds to load
    from shoal.checkpoint import reshard as rewrite
    from shoal.checkpoint import writing_into
    from shoal.plan import buffers_of, held_by_rank

    held = held_by_rank(settings)
    with writing_into(location_of(out, "OUT")) as folder:
        made = rewrite(step, folder, held, buffers_of(settings))
    typer.echo(f"Wrote {made} for {len(held)} ranks from {step}")
