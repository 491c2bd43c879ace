"""The degrees of parallelism besides data parallelism, which follows from them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from shoal.config.section import Section


class ParallelSettings(Section):
    """``parallel``: how many ways each kind of parallelism splits the model."""

    pipeline: int = Field(default=1, ge=1)
    """Pipeline stages: runs of layers on ranks of their own, through which microbatches pass."""

    virtual_stages: int = Field(default=1, ge=1)
    """Runs of layers of each pipeline stage. More than one are interleaved: a microbatch passes
    through all stages as many times, stages wait less for each other, and send more."""

    context: int = Field(default=1, ge=1)
    """Ranks that share the tokens of each sequence; they read the same ones."""

    context_exchange: Literal["gather", "ring"] = "gather"
    """How keys and values reach the other ranks of a sequence: `gather` brings all of a layer to
    each rank in one collective; `ring` hands them round while computing, so that a rank holds two
    ranks' share at most, in as many steps as there are ranks."""

    expert: int = Field(default=1, ge=1)
    """Ranks that share one set of experts: each keeps its part of them, and tokens travel. A
    divisor of the number of experts and of the ranks of a stage in one domain."""

    tensor: int = Field(default=1, ge=1)
    """Tensor parallelism; training takes 1 only."""

    expert_tensor: int = Field(default=1, ge=1)
    """Tensor parallelism inside an expert; training takes 1 only."""
