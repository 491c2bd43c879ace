"""Models to measure: as large as any, and of random weights."""

from __future__ import annotations

from pathlib import Path

import torch

from shoal.models import (
    DecoderConfig,
    InitialWeights,
    parameter_shapes,
    whole_tensors,
    write_hf_folder,
)


def write_random_model(folder: Path, decoder: DecoderConfig) -> None:
    """Write ``decoder`` with the weights of seed 0, in bf16, as a Hugging Face folder."""
    weights = InitialWeights(parameter_shapes(decoder), 0, decoder.initializer_range)
    write_hf_folder(folder, decoder, whole_tensors(weights), dtype=torch.bfloat16)
