"""The degrees of parallelism besides data parallelism, which follows from them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from shoal.config.section import Section, in_vain, refuse


class ParallelSettings(Section):
    """``parallel``: how many ways each kind of parallelism splits the model."""

    pipeline: int = Field(default=1, ge=1)
    """Pipeline stages: runs of layers on ranks of their own, through which microbatches pass."""

    virtual_stages: int = Field(default=1, ge=1)
    """Runs of layers on each pipeline stage. Several are interleaved: a microbatch passes through
    all stages that many times, and stages wait less for each other but send more."""

    context: int = Field(default=1, ge=1)
    """Ranks that share the tokens of each sequence; they read the same sequences."""

    context_exchange: Literal["gather", "ring"] = "gather"
    """How keys and values reach the other ranks of a sequence: ``gather`` brings all those of a
    layer to each rank in one collective; ``ring`` passes them around while computing, in as many
    steps as there are ranks, so that a rank holds at most two ranks' shares."""

    expert: int = Field(default=1, ge=1)
    """Ranks that share one set of experts: each keeps its part of them, and tokens travel. The
    number of experts must be divisible by it, and so must the number of a stage's ranks in one
    domain."""

    tensor: int = Field(default=1, ge=1)
    """Tensor parallelism; training takes only 1."""

    expert_tensor: int = Field(default=1, ge=1)
    """Tensor parallelism inside an expert; training takes only 1."""

    @model_validator(mode="after")
    def _exchanges_what_is_shared(self) -> ParallelSettings:
        if self.context == 1:
            problem = "with parallel.context = 1 no rank has keys and values for another"
            remedy = "Leave it out, or set parallel.context to 2 or more"
            refuse(in_vain(self, ("context_exchange",), problem, remedy))
        return self
