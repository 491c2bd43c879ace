"""``shoal export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from shoal.errors import ConfigError


def export(
    checkpoint: Annotated[
        Path, typer.Argument(help="A step's folder, or a run's folder for its newest step.")
    ],
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
    from shoal.checkpoint import export_megatron, newest

    step = checkpoint
    if (checkpoint / "checkpoints").is_dir():
        found = newest(checkpoint / "checkpoints")
        if found is None:
            problem, remedy = "the run has no complete checkpoint", "Train it first"
            raise ConfigError("CHECKPOINT", str(checkpoint), problem, remedy)
        step = found.path
    elif not checkpoint.is_dir():
        remedy = "Give a step's folder, such as runs/run/checkpoints/step-00000010"
        raise ConfigError("CHECKPOINT", str(checkpoint), "there is no such folder", remedy)
    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32}
    write = {"hf": export_hf, "megatron": export_megatron}[form]
    write(step, out, dtype=dtypes[dtype])
    typer.echo(f"Wrote {out} from {step}")
