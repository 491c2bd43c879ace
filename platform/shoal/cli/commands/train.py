"""``shoal train``."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from shoal.cli.options import ConfigFile, Overrides
from shoal.cli.upward import resolve
from shoal.config import load_config


def train(
    config: ConfigFile,
    overrides: Overrides = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="auto|never|PATH",
            help="Go on from the newest checkpoint, refuse a used folder, or start from PATH.",
        ),
    ] = None,
) -> None:
    """Train under Ray Train, on a Ray of its own unless RAY_ADDRESS names a cluster."""
    laid_over = list(overrides or ())
    if resume is not None:
        # In quotes, so that a folder whose name looks like a number stays text.
        laid_over.append(f"checkpoint.resume={json.dumps(resume, ensure_ascii=False)}")
    settings = load_config(config, laid_over)
    raise typer.Exit(resolve("shoal_actors.train:run")(settings))
