"""``shoal plan``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from shoal.cli.options import AsJson, ConfigFile, Overrides
from shoal.config import (
    Config,
    apply_overrides,
    config_from_tree,
    describes_training,
    load_tree,
    serve_config_from_tree,
)
from shoal.errors import ConfigError

Svg = Annotated[
    Path | None, typer.Option("--svg", metavar="FILE", help="Also draw mesh and memory.")
]
Gpu = Annotated[
    str | None,
    typer.Option(
        "--gpu", metavar="KIND", help="Plan for such GPUs (A100, H100, ...), and estimate the time."
    ),
]
Measure = Annotated[
    bool, typer.Option("--measure", help="Estimate the time on CPUs as fast as this machine's.")
]
Search = Annotated[bool, typer.Option("--search", help="Find the fastest layouts that fit.")]
Gpus = Annotated[
    int | None,
    typer.Option("--gpus", metavar="N", help="Number of GPUs, in place of cluster.workers."),
]
Memory = Annotated[
    float | None,
    typer.Option("--memory", metavar="GIB", help="Memory that a search may fill on each device."),
]
Top = Annotated[
    int | None,
    typer.Option("--top", min=1, max=100, help="Number of layouts that a search shows; unset: 5."),
]
_TOP = 5


def plan(
    config: ConfigFile,
    overrides: Overrides = None,
    as_json: AsJson = False,
    svg: Svg = None,
    gpu: Gpu = None,
    measure: Measure = False,
    search: Search = False,
    gpus: Gpus = None,
    memory: Memory = None,
    top: Top = None,
) -> None:
    """Show what a run, or serving, will need, or the reasons to refuse it.

    For a run that is mesh, ranks, memory, traffic and time of a step; for serving, where the file
    has a section serve or names a model's folder alone, weights, keys and values.
    """
    tree = load_tree(config, overrides or ())
    of_search = {"--memory": memory, "--top": top}
    if not describes_training(tree):
        of_training = {"--svg": svg, "--gpu": gpu, "--measure": measure, "--search": search}
        _refuse_any(
            {**of_training, "--gpus": gpus, **of_search},
            "the file describes serving alone, and this is of training",
            "Leave it out, or add data and train to the file",
        )
        served = serve_config_from_tree(tree)
        from shoal.cli.planned_serving import print_serving

        print_serving(served, as_json=as_json)
        return
    if gpus is not None:
        _lay_gpus(tree, gpus, gpu)
    settings = config_from_tree(tree)
    if search:
        _search(
            settings,
            gpu=gpu,
            measure=measure,
            memory_gib=memory,
            most=top or _TOP,
            as_json=as_json,
            svg=svg,
        )
        return
    _refuse_any(of_search, "only a search has a use for it", "Add --search")
    _plan(settings, tree, gpu=gpu, measure=measure, as_json=as_json, svg=svg)


def _lay_gpus(tree: dict[str, Any], gpus: int, gpu: str | None) -> None:
    """Lay ``--gpus`` over the file's values."""
    if gpu is None:
        problem = "no kind of GPU is given, and a plan without one may be for CPUs"
        raise ConfigError("--gpus", gpus, problem, f"Add --gpu, or --set cluster.workers={gpus}")
    apply_overrides(tree, [f"cluster.workers={gpus}"])


def _plan(
    settings: Config,
    tree: dict[str, Any],
    *,
    gpu: str | None,
    measure: bool,
    as_json: bool,
    svg: Path | None,
) -> None:
    """Show the plan of the run that ``tree`` describes, and below it that of its serving."""
    # torch takes seconds to load, and a wrong file should be refused at once
    from rich.console import Console

    from shoal.plan import (
        draw_plan,
        machine_and_rates,
        make_plan,
        print_plan,
        print_sheets,
        sizes_shown,
    )

    machine, rates = machine_and_rates(settings, gpu=gpu, measure=measure)
    made = make_plan(settings, machine, rates=rates)
    if svg is not None:
        _write(svg, draw_plan(made))
    values = made.as_dict()
    more, sheets = sizes_shown(settings, machine, rates)
    values |= more
    if "serve" in tree:
        # loads numba, for which training has no use
        from shoal.cli.planned_serving import beside_training

        values["serving"], served_sheets = beside_training(tree)
        sheets += served_sheets
    if as_json:
        typer.echo(json.dumps(values, indent=2))
    else:
        print_plan(made, Console())
        print_sheets(sheets, Console())


def _refuse_any(options: Mapping[str, object], problem: str, remedy: str) -> None:
    """Refuse the first option that was given: nothing would read it."""
    for name, value in options.items():
        if value is not None and value is not False:
            shown = str(value) if isinstance(value, Path) else value
            raise ConfigError(name, shown, problem, remedy)


def _search(
    settings: Config,
    *,
    gpu: str | None,
    measure: bool,
    memory_gib: float | None,
    most: int,
    as_json: bool,
    svg: Path | None,
) -> None:
    from rich.console import Console

    from shoal.plan import (
        draw_plan,
        found_as_dict,
        print_sheets,
        search,
        search_sheets,
        search_target,
    )

    machine, rates, memory_bytes = search_target(
        settings, gpu=gpu, measure=measure, memory_gib=memory_gib
    )
    found = search(settings, machine, rates, memory_bytes=memory_bytes, most=most)
    if svg is not None:
        _write(svg, draw_plan(found.best[0][1]))
    if as_json:
        typer.echo(json.dumps(found_as_dict(found, settings), indent=2))
    else:
        print_sheets(search_sheets(found, settings), Console())


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        problem = f"the picture cannot be written there: {error.strerror}"
        raise ConfigError(
            "--svg", str(path), problem, "Give a file in a folder that you may write to"
        ) from error
