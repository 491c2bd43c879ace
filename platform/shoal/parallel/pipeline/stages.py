"""Which stage computes which run of layers.

The model is cut into chunks of consecutive layers, and chunk c belongs to stage c mod S. With
several chunks a stage (virtual stages) a microbatch passes through all stages several times::

    3 stages, 2 chunks each     stage 0    chunks 0, 3
                                stage 1    chunks 1, 4
                                stage 2    chunks 2, 5
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """The stages of a pipeline and the chunks on them."""

    num_stages: int
    """Stages, each of which computes at the same time as the others."""

    virtual: int = 1
    """Chunks of each stage."""

    @property
    def num_chunks(self) -> int:
        """Chunks of the whole model."""
        return self.num_stages * self.virtual

    def stage_of(self, chunk: int) -> int:
        """The stage that computes a chunk."""
        return chunk % self.num_stages

    def chunks_of(self, stage: int) -> range:
        """The chunks of a stage, in the order of the model."""
        return range(stage, self.num_chunks, self.num_stages)

    def is_first(self, chunk: int) -> bool:
        """Whether a chunk begins the model."""
        return chunk == 0

    def is_last(self, chunk: int) -> bool:
        """Whether a chunk ends the model."""
        return chunk == self.num_chunks - 1
