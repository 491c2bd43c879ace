"""``shoal export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from shoal.cli.options import StepArgument
from shoal.cli.steps import step_of


def export(
    checkpoint: StepArgument,
    out: Annotated[Path, typer.Argument(help="Folder to write; new or empty.")],
    dtype: Annotated[
        Literal["bf16", "fp32"], typer.Option(help="Format of the written weights.")
    ] = "bf16",
    form: Annotated[
        Literal["hf", "megatron"],
        typer.Option(
            "--format", help="hf for transformers and vLLM, megatron for Megatron Core's dense GPT."
        ),
    ] = "hf",
) -> None:
    """Turn a checkpoint into a Hugging Face folder, or into a checkpoint of Megatron Core."""
    # torch takes seconds to load
    import torch

    from shoal.checkpoint import export as export_hf
    from shoal.checkpoint import export_megatron

    step = step_of(checkpoint, "CHECKPOINT")
    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32}
    write = {"hf": export_hf, "megatron": export_megatron}[form]
    write(step, out, dtype=dtypes[dtype])
    typer.echo(f"Wrote {out} from {step}")
