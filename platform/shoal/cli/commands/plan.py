"""``shoal plan``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.options import AsJson, ConfigFile, Overrides
from shoal.config import load_config
from shoal.errors import ConfigError


def plan(
    config: ConfigFile,
    overrides: Overrides = None,
    as_json: AsJson = False,
    svg: Annotated[
        Path | None, typer.Option("--svg", metavar="FILE", help="Also draw mesh and memory.")
    ] = None,
) -> None:
    """Show mesh, ranks, memory and traffic of a run, or the reasons to refuse it."""
    settings = load_config(config, overrides or ())
    # torch takes seconds to load, and a wrong file should be refused at once
    from rich.console import Console

    from shoal.plan import draw_plan, make_plan, print_plan

    made = make_plan(settings)
    if svg is not None:
        _write(svg, draw_plan(made))
    if as_json:
        typer.echo(json.dumps(made.as_dict(), indent=2))
    else:
        print_plan(made, Console())


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        problem = f"the picture cannot be written there: {error.strerror}"
        raise ConfigError(
            "--svg", str(path), problem, "Give a file in a folder that you may write to"
        ) from error
