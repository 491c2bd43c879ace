"""From a checkpoint to a Hugging Face or Megatron folder, in one process and a tensor at a time.

What the folder needs beside weights travels in the checkpoint: ``attachments/hf`` holds the model's
``config.json`` and the files of its tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from shoal.checkpoint.contents import ATTACHMENTS
from shoal.checkpoint.weights import CheckpointWeights
from shoal.errors import ConfigError, disk_error
from shoal.models import (
    DecoderConfig,
    ExpertLayout,
    read_hf_config,
    whole_tensors,
    write_hf_folder,
    write_megatron_folder,
)
from shoal.models.export import CARRIED_FILES
from shoal.models.hf_folder import CONFIG
from shoal.storage import Location, Manifest, read_file, told

HF_FOLDER = "hf"
"""Name among the attachments of the files that a Hugging Face folder has beside weights."""


def hf_attachments(
    hf_config: Mapping[str, Any], model_folder: Path | None = None
) -> dict[str, bytes]:
    """What ``save`` must attach so that ``export`` can work.

    ``hf_config`` is the model's config, ``model_folder`` where tokenizer files are, if anywhere.
    These are read here, so that later steps carry the same. Raises WorkError for one that is there
    and cannot be read, Unavailable where that may pass.
    """
    attachments = {f"{HF_FOLDER}/{CONFIG}": json.dumps(dict(hf_config), indent=2).encode()}
    if model_folder is not None:
        for name in CARRIED_FILES:
            path = model_folder / name
            try:
                if path.is_file():
                    attachments[f"{HF_FOLDER}/{name}"] = path.read_bytes()
            except OSError as error:
                raise disk_error(f"{path} cannot be read: {told(error)}.", error) from error
    return attachments


def export(
    checkpoint: Location,
    out: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    expert_layout: ExpertLayout = ExpertLayout.SEPARATE,
) -> None:
    """Write a checkpoint's weights in ``dtype`` as a folder that ``transformers`` and vLLM load.

    Needs no process group, and memory for one file of the folder and one tensor. Raises WorkError
    where the checkpoint is damaged or the disk refuses, and ConfigError where ``out`` has content
    or the checkpoint carries no model config.
    """
    with _opened(checkpoint) as (weights, config, carried):
        write_hf_folder(
            out,
            config,
            whole_tensors(weights),
            dtype=dtype,
            expert_layout=expert_layout,
            carry_from=carried,
        )


def export_megatron(
    checkpoint: Location, out: Path, *, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write a checkpoint's weights in ``dtype`` as one that Megatron Core's dense GPT loads.

    Raises as ``export`` does, and ConfigError for a model that Megatron's dense GPT cannot be.
    """
    with _opened(checkpoint) as (weights, config, carried):
        write_megatron_folder(out, config, weights, dtype=dtype, carry_from=carried)


@contextmanager
def _opened(checkpoint: Location) -> Iterator[tuple[CheckpointWeights, DecoderConfig, Path]]:
    """Weights, model, and a folder of what else belongs to it."""
    weights = CheckpointWeights(checkpoint)
    kept = checkpoint / ATTACHMENTS / HF_FOLDER
    names = [name.rpartition("/")[2] for name in Manifest.read(checkpoint).files if _is_kept(name)]
    if CONFIG not in names:
        raise ConfigError(
            "CHECKPOINT",
            str(checkpoint),
            f"it carries no {ATTACHMENTS}/{HF_FOLDER}/{CONFIG}, so its model is not known",
            "Export a checkpoint that shoal train saved",
        )
    with TemporaryDirectory() as folder:
        carried = Path(folder)
        for name in names:
            (carried / name).write_bytes(read_file(kept / name))
        yield weights, DecoderConfig.from_hf(read_hf_config(carried)), carried


def _is_kept(name: str) -> bool:
    return name.rpartition("/")[0] == f"{ATTACHMENTS}/{HF_FOLDER}"
