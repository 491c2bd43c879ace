"""``shoal serve``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.options import Overrides
from shoal.cli.upward import resolve
from shoal.config import load_serve_tree, serve_config_from_tree


def serve(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL_OR_CONFIG",
            help="Folder of a Hugging Face model, or a YAML file with model.path and serve.",
        ),
    ],
    overrides: Overrides = None,
) -> None:
    """Serve OpenAI's endpoints, on a Ray of its own unless RAY_ADDRESS names a cluster."""
    tree = load_serve_tree(model, list(overrides or ()))
    config = serve_config_from_tree(tree)
    run = resolve("shoal_deployments.serving:run")
    raise typer.Exit(run(config, also_trains="train" in tree))
