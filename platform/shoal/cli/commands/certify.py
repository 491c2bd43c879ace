"""``shoal certify``."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from shoal.cli.options import AsJson
from shoal.cli.serving import ModelFolder, PrecisionOption, check_folder, say_loading


def certify(
    model: ModelFolder,
    precision: PrecisionOption = "auto",
    quick: Annotated[
        bool, typer.Option("--quick", help="A few chunk sizes and orders of arrival, not all.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Prove or refute that no answer depends on others, chunks, cache, memory, threads or replica.

    Exit code 1 if it is refuted; the first case that differs is named.
    """
    check_folder(model)
    say_loading(model)
    from shoal.inference.certify import Subject, prove  # torch takes seconds to load

    show = None if as_json else lambda finding: typer.echo(str(finding))
    proof = prove(Subject(folder=model, precision=precision), quick=quick, report=show)
    if as_json:
        typer.echo(json.dumps(proof.as_dict(), indent=2))
    elif proof.holds:
        kernels = proof.kernels
        typer.echo(f"kernels: {len(kernels.kernels)} proven, fingerprint {kernels.fingerprint}")
        typer.echo(f"The same bits everywhere, in {proof.precision}.")
    else:
        typer.echo(f"Refuted, in {proof.precision}. First: {proof.first_difference}")
    raise typer.Exit(0 if proof.holds else 1)
