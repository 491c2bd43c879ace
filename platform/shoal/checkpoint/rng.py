"""The state of torch's generators on one rank."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

logger = logging.getLogger(__name__)


def capture_rng() -> dict[str, torch.Tensor]:
    """State of the CPU's generator and, where there is CUDA, of the current device's; uint8."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_rng(state: Mapping[str, torch.Tensor]) -> None:
    """Put the generators back to where ``capture_rng`` found them."""
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    elif "cuda" in state or torch.cuda.is_available():
        logger.warning(
            "The saved random state is of another kind of device than this: dropout on the device "
            "starts from its seed."
        )
