"""The moments of a step at which a part of the model may need the most memory.

    head             all activations are kept; a chunk of logits, and the gradients computed ahead
    head's backward  that gradient goes into the root unit's contribution, which stays to the end
    final norm       in backward, the last layer's weights on their way
    each layer       its MLP in backward, then its attention: what was kept shrinks from the last
                     layer to the first, while contributions of two neighbours are there
    end              the root unit's contribution is reduced

With recomputation a layer's activations exist in its own backward only. A forward never needs more
than the backward that follows it, so none is listed but the head's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shoal.models import DecoderConfig, Part
from shoal.plan.activations import (
    FP32_BYTES,
    Kernels,
    head_bytes,
    head_gradient_bytes,
    layer_bytes,
    mlp_bytes,
)
from shoal.plan.backward import (
    attention_backward_bytes,
    final_norm_bytes,
    mlp_backward_bytes,
)
from shoal.plan.group import Group
from shoal.plan.memory import Kind
from shoal.plan.mxfp8 import Scratch

Moment = dict[Kind, int]
"""Bytes of the kinds that come and go in a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMemory:
    """One layer in backward."""

    kept: int
    """Bytes kept for it since forward."""
    again: int
    """Bytes computed again."""
    mlp: int
    """Bytes that only exist while its MLP is in backward."""
    attention: int
    """Bytes while its attention is, less what its MLP had kept."""

    units: tuple[tuple[Group, ...], ...]
    """The groups of its own unit, then those of its experts'."""

    @property
    def kind(self) -> tuple[Any, ...]:
        """Layers of equal kinds need equal memory."""
        groups = (group for unit in self.units for group in unit)
        return self.kept, self.mlp, self.attention, *(group.kind for group in groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartMemory:
    """One part of the model on one rank."""

    decoder: DecoderConfig
    part: Part
    groups: tuple[Group, ...]
    """In the order of forward, the root's first."""

    kernels: Kernels
    num_tokens: int
    """Of a microbatch, on this rank."""
    num_microbatches: int
    recompute: bool
    shares_sequences: bool
    kv_bytes: int
    """Keys and values of others in a layer's backward."""
    expert_bytes: int
    """Rows on their way to experts of other ranks."""
    scratch: Scratch
    """What products in MXFP8 take."""

    def moments(self, in_flight: int) -> Iterator[Moment]:
        """Every moment of a backward that begins with ``in_flight`` bytes of activations."""
        roots, layers = self._units()
        root = _Held.of(roots, self.num_microbatches)
        first = _Held.of(layers[-1].units[0], self.num_microbatches)
        if self.part.is_last:
            yield from self._of_head(in_flight, root, first)
            in_flight -= self.num_tokens * self.kernels.norm(self.decoder.hidden_size)
        else:
            in_flight += self._hidden  # the gradient that was received
        reducing = 0
        for number in reversed(range(len(layers))):
            layer, following = layers[number], layers[max(number - 1, 0)]
            # In the midst of layers that are alike, the ones before needed more.
            if [layer.kind] * 3 != [x.kind for x in (following, *layers[number + 1 : number + 3])]:
                after = sum(group.arriving_bytes for group in following.units[0] * bool(number))
                yield from self._of_layer(layer, in_flight, after, root, reducing)
            own = _Held.of(layer.units[0], self.num_microbatches)
            reducing = own.collected + own.reducing if own.reducing else 0
            in_flight -= layer.kept
        yield {
            Kind.WHOLE_WEIGHTS: root.whole,
            Kind.CONTRIBUTIONS: root.collected + max(root.reducing, reducing),
            Kind.ACTIVATIONS: in_flight,
        }

    def _of_layer(
        self, layer: LayerMemory, in_flight: int, after: int, root: _Held, reducing: int
    ) -> Iterator[Moment]:
        """Its MLP, then its attention, in backward.

        ``after`` are whole weights on their way, ``reducing`` contributions that came before.
        """
        own, *experts = (_Held.of(unit, self.num_microbatches) for unit in layer.units)
        whole, collected = root.whole + own.whole + after, root.collected + own.collected
        kept = in_flight + layer.again
        last = experts[-1] if experts else own
        yield {
            Kind.WHOLE_WEIGHTS: whole + sum(held.whole for held in experts),
            Kind.CONTRIBUTIONS: collected
            + sum(held.collected for held in experts)
            + max(last.largest, reducing),
            Kind.ACTIVATIONS: kept + layer.mlp,
            Kind.EXCHANGE: self.expert_bytes if experts else 0,
        }
        reducing = sum(held.collected + held.reducing for held in experts) or reducing
        yield {
            Kind.WHOLE_WEIGHTS: whole,
            Kind.CONTRIBUTIONS: collected + max(own.largest, reducing),
            Kind.ACTIVATIONS: kept + layer.attention,
            Kind.EXCHANGE: self.kv_bytes,
        }

    def _of_head(self, in_flight: int, root: _Held, last: _Held) -> Iterator[Moment]:
        decoder, kernels = self.decoder, self.kernels
        gradient = head_gradient_bytes(decoder)
        yield {
            Kind.WHOLE_WEIGHTS: root.whole,
            Kind.ACTIVATIONS: in_flight,
            Kind.HEAD: head_bytes(decoder, kernels.element_bytes, self.num_tokens),
        }
        yield {
            Kind.WHOLE_WEIGHTS: root.whole + last.whole,
            Kind.CONTRIBUTIONS: root.collected,
            Kind.ACTIVATIONS: in_flight,
            Kind.HEAD: self._hidden + gradient * kernels.element_bytes // FP32_BYTES,
        }
        yield {
            Kind.WHOLE_WEIGHTS: root.whole + last.whole,
            Kind.CONTRIBUTIONS: root.collected,
            Kind.ACTIVATIONS: in_flight + final_norm_bytes(decoder, kernels, self.num_tokens),
        }

    @property
    def _hidden(self) -> int:
        return self.num_tokens * self.kernels.element_bytes * self.decoder.hidden_size

    def _units(self) -> tuple[tuple[Group, ...], list[LayerMemory]]:
        """The root's groups, and each layer's memory in the order of forward."""
        units: dict[str, list[Group]] = {}
        for group in self.groups:
            units.setdefault(group.unit, []).append(group)
        roots = tuple(units.pop("", ()))
        layers: dict[str, list[tuple[Group, ...]]] = {}
        for unit, groups in units.items():
            layers.setdefault(unit.removesuffix(".mlp.experts"), []).append(tuple(groups))
        pairs = zip(self.part.layers, layers.values(), strict=True)
        return roots, [self._layer(layer, tuple(held)) for layer, held in pairs]

    def _layer(self, layer: int, units: tuple[tuple[Group, ...], ...]) -> LayerMemory:
        shape = (self.decoder, layer, self.kernels, self.num_tokens)
        whole = layer_bytes(*shape)
        is_input_shared = self.kernels.fused_norm or self.kernels.element_bytes == FP32_BYTES
        attention = attention_backward_bytes(
            self.decoder,
            self.kernels,
            self.num_tokens,
            shares_sequences=self.shares_sequences,
        )
        return LayerMemory(
            kept=self._hidden if self.recompute else whole,
            again=whole - is_input_shared * self._hidden if self.recompute else 0,
            mlp=mlp_backward_bytes(*shape) + self.scratch.mlp(layer),
            attention=attention - mlp_bytes(*shape) + self.scratch.attention(layer),
            units=units,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """Bytes of a unit while it is in backward."""

    whole: int
    collected: int
    reducing: int
    largest: int

    @staticmethod
    def of(groups: tuple[Group, ...], num_microbatches: int) -> _Held:
        return _Held(
            whole=sum(group.whole_weight_bytes for group in groups),
            collected=sum(group.collected_bytes(num_microbatches) for group in groups),
            reducing=max((group.reducing_bytes(num_microbatches) for group in groups), default=0),
            largest=max((group.largest_gradient_bytes for group in groups), default=0),
        )
