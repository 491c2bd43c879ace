"""Number formats of a run, with ``auto`` decided."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shoal.config import Config
from shoal.errors import ConfigError
from shoal.plan.machine import Machine

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Formats of the configuration that this version computes with."""


MOMENT_DTYPES = {**DTYPES, "8bit": torch.uint8}
"""Formats of moments; codes of 8 bits have scales beside them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """The format of each stage of a training step."""

    compute: torch.dtype
    """Forward and backward, and the weights that travel between ranks."""

    main_weights: torch.dtype
    """Weights that the optimizer updates."""

    rounding: str
    """How they are rounded, ``nearest`` or ``stochastic``."""

    main_gradients: torch.dtype
    """Gradients accumulated over microbatches."""

    reduce: torch.dtype
    """Sums of gradients over ranks."""

    moments: torch.dtype
    """Moments of the optimizer; uint8 is codes of 8 bits (``shoal.ops.eight_bit``)."""

    mxfp8: bool = False
    """Whether linear and expert layers multiply in MXFP8, and the rest in ``compute``."""

    mxfp8_gather: bool = False
    """Whether the weights of those layers travel in MXFP8 too."""

    reason: str
    """Why ``compute`` is what it is, as a clause for the user."""


def resolve_device(config: Config, machine: Machine) -> str:
    """``cpu`` or ``cuda``; raises ``ConfigError`` for ``cuda`` where there is none."""
    device = config.cluster.device
    if device == "auto":
        return "cuda" if machine.has_cuda else "cpu"
    if device == "cuda" and not machine.has_cuda:
        raise ConfigError(
            "cluster.device", device, "no CUDA device is found", "Use cpu or auto, or add GPUs"
        )
    return device


def resolve_precision(config: Config, machine: Machine | None = None) -> Precision:
    """The formats that ``precision`` asks for on ``machine`` (this one by default).

    ``auto`` computes in bf16 on CUDA and on CPUs with bf16 units, and in fp32 elsewhere. Ranks on
    unequal machines must not each decide for themselves: let one decide for all.

    Raises:
        ConfigError: for a format that this version cannot compute with, and for ``cuda`` where
            there is none.
    """
    machine = machine or Machine.here()
    settings = config.precision
    if settings.compute == "auto":
        compute, reason = _automatic(resolve_device(config, machine), machine)
    elif settings.compute == "mxfp8":
        _check_mxfp8(resolve_device(config, machine))
        travel = settings.parameter_gather or "mxfp8"
        reason = f"linear and expert layers in mxfp8, as asked; their weights travel in {travel}"
        compute = torch.bfloat16
    else:
        compute, reason = DTYPES[settings.compute], "as asked"
    gather = settings.parameter_gather
    mxfp8 = settings.compute == "mxfp8"
    if gather == "mxfp8" and not mxfp8:
        problem = "only weights that multiply in MXFP8 can travel in it"
        remedy = "Leave it out, or set precision.compute to mxfp8"
        raise ConfigError("precision.parameter_gather", gather, problem, remedy)
    if gather == "bf16" and compute is not torch.bfloat16:
        problem = "weights travel in the format of compute, which is fp32"
        remedy = "Leave it out, or set precision.compute to bf16"
        raise ConfigError("precision.parameter_gather", gather, problem, remedy)
    return Precision(
        compute=compute,
        main_weights=DTYPES[settings.main_weights],
        rounding=settings.rounding,
        main_gradients=DTYPES[settings.main_gradients],
        reduce=DTYPES[settings.reduce],
        moments=MOMENT_DTYPES[settings.moments],
        mxfp8=mxfp8,
        mxfp8_gather=mxfp8 and gather != "bf16",
        reason=reason,
    )


def _automatic(device: str, machine: Machine) -> tuple[torch.dtype, str]:
    if device == "cuda":
        return torch.bfloat16, "auto on CUDA"
    if machine.cpu_has_bf16:
        return torch.bfloat16, "auto on a CPU with bf16 units"
    return torch.float32, "auto on a CPU without bf16 units"


def _check_mxfp8(device: str) -> None:
    if device == "cuda":
        problem = "MXFP8 is computed by emulation on CPUs; GPUs have no kernels for it here"
        raise ConfigError("precision.compute", "mxfp8", problem, "Use bf16")
