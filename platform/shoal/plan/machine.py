"""What a worker's machine can do, as far as a plan depends on it."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Abilities of the machines that the workers run on."""

    has_cuda: bool
    """Whether there is a CUDA device for every worker."""

    cpu_has_bf16: bool
    """Whether the CPU multiplies bf16 matrices in hardware (AVX512-BF16 or AMX)."""

    @staticmethod
    def here() -> Machine:
        """The machine that this process runs on."""
        return Machine(
            has_cuda=torch.cuda.is_available(),
            cpu_has_bf16=torch.cpu._is_avx512_bf16_supported()
            or torch.cpu._is_amx_tile_supported(),
        )

    @staticmethod
    def with_gpus() -> Machine:
        """A machine with a GPU for each worker."""
        return Machine(has_cuda=True, cpu_has_bf16=True)
