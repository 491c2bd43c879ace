"""What context parallelism adds to a step: collectives inside each layer, and memory for them.

With n ranks, M microbatches and a rank's share of a layer's keys and values (the longest rank's:
they travel in equal sizes), each layer takes part in::

    gather   all-gathers of n shares       M forward, M backward, M where it is computed again
             reduce-scatters of n shares   M, in the compute format
    ring     hands on a share, as often    n - 1 times each of those
             and its gradient in fp32      n times M

Models with experts also add up each sequence's visits, once a microbatch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import torch

from shoal.config import Config
from shoal.fsdp.ledger import Operation
from shoal.models import DecoderConfig, Part
from shoal.parallel.context import SequenceCut
from shoal.plan.activations import FP32_BYTES
from shoal.plan.batches import Batches
from shoal.plan.traffic import Stream, Traffic, What
from shoal.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextPlan:
    """One group of ranks that share the tokens of each sequence; also a group of one."""

    config: Config
    decoder: DecoderConfig
    topology: Topology
    batches: Batches
    compute: torch.dtype

    stage: int
    """Pipeline stage of the group."""

    parts: tuple[Part, ...]
    """What the stage holds of the model."""

    @property
    def tokens_per_rank(self) -> int:
        """Most tokens of a microbatch that one rank computes."""
        if self._size == 1:
            return self.batches.micro_batch * self.batches.seq_len
        cut = SequenceCut(length=self.batches.seq_len, size=self._size)
        return self.batches.micro_batch * cut.longest

    @property
    def mean_tokens(self) -> Fraction:
        """Tokens of a microbatch on a rank of the group, in the mean."""
        return Fraction(self.batches.micro_batch * self.batches.seq_len, self._size)

    @property
    def exchange_bytes(self) -> int:
        """Bytes of keys, values and their gradients beside a rank's own, in a layer's backward."""
        if self._size == 1:
            return 0
        share, wide = self._share * self.compute.itemsize, self._share * FP32_BYTES
        if self._is_ring:
            return 2 * share + 3 * wide  # held, arriving; being added to, arriving, leaving
        whole = self._size * share
        return whole + self._size * wide + 2 * whole  # gathered, summed up, sent, received

    def traffic(self) -> Iterator[Traffic]:
        """The group's collectives of one step, as each rank takes part in them."""
        if self._size == 1:
            return
        microbatches = self.batches.num_microbatches
        layers = sum(len(part.layers) for part in self.parts)
        passes = 3 if self.config.train.recompute == "layer" else 2
        share, wide = self._share * self.compute.itemsize, self._share * FP32_BYTES
        times = layers * microbatches
        if self._is_ring:
            turns = self._size - 1
            yield self._traffic("keys and values", "all_to_all", passes * turns * times, share)
            yield self._traffic(
                "gradients of keys and values", "all_to_all", self._size * times, wide
            )
        else:
            whole = self._size * share
            yield self._traffic("keys and values", "all_gather", passes * times, whole)
            yield self._traffic("gradients of keys and values", "reduce_scatter", times, whole)
        makes_loss = any(part.is_last for part in self.parts)
        if self.decoder.experts is not None and any(self.decoder.sparse_layers) and makes_loss:
            counts = self.batches.micro_batch * self.decoder.experts.num_experts * FP32_BYTES
            yield self._traffic("visits of experts", "all_reduce", microbatches, counts)

    @property
    def _size(self) -> int:
        return self.topology.context

    @property
    def _is_ring(self) -> bool:
        return self.config.parallel.context_exchange == "ring"

    @property
    def _share(self) -> int:
        """Elements of one layer's keys and values of a rank's tokens."""
        width = self.decoder.num_key_value_heads * self.decoder.head_dim
        return 2 * self.tokens_per_rank * width

    def _traffic(self, what: What, operation: Operation, count: int, payload: int) -> Traffic:
        stream = Stream(
            stage=self.stage,
            layers="dense",
            what=what,
            operation=operation,
            axis="context",
            group_size=self._size,
        )
        return Traffic(stream=stream, count=count, payload_bytes=count * payload)
