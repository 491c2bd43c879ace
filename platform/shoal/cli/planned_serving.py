"""What ``shoal plan`` tells of a file's section ``serve``."""

from __future__ import annotations

import json
from typing import Any

import typer
from rich.console import Console

from shoal.cli.upward import resolve
from shoal.config import ServeConfig, serve_config_from_tree
from shoal.errors import ConfigError
from shoal.inference.refusals import Host
from shoal.plan import Sheet, print_sheets
from shoal.plan.serving import plan_serving, refusal_as_dict
from shoal.plan.serving_sheets import refusal_sheet, serving_sheets


def print_serving(config: ServeConfig, *, as_json: bool) -> None:
    """Plan serving alone; raises ConfigError and WorkError as ``plan_serving`` does."""
    made = plan_serving(config, _host())
    if as_json:
        typer.echo(json.dumps({"serving": made.as_dict()}, indent=2))
    else:
        print_sheets(serving_sheets(made), Console())


def beside_training(tree: dict[str, Any]) -> tuple[dict[str, Any], tuple[Sheet, ...]]:
    """For JSON and as tables, how a model that is to be trained will be served.

    A refusal is shown in their place: it says nothing against the training, whose model may not
    have been written yet.
    """
    try:
        made = plan_serving(serve_config_from_tree(tree), _host())
    except ConfigError as error:
        return refusal_as_dict(error), (refusal_sheet(error),)
    return made.as_dict(), tuple(serving_sheets(made))


def _host() -> Host | None:
    """The machine that ``shoal serve`` would serve on, unless that is a cluster's."""
    return None if resolve("shoal_actors.driver:is_elsewhere")() else Host.here()
