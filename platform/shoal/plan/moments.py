"""The moments of a step at which a part of the model may need the most memory.

    head             all activations are kept; a chunk of logits, and the gradients computed ahead
    head's backward  that gradient goes into the root unit's contribution, which stays to the end
    final norm       in backward, the last layer's weights on their way
    each layer       its MLP in backward, a mixture's in several steps (``shoal.plan.backward``),
                     then its attention: what was kept shrinks from the last layer to the first,
                     while contributions of two neighbours are there
    end              the root unit's contribution is made, or completed, and reduced

With recomputation a layer's activations exist in its own backward only. A forward never needs more
than the backward that follows it, so none is listed but the head's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
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
    MixtureBackward,
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
class Phase:
    """Bytes at one moment of a layer's MLP in backward."""

    activations: int
    """Beside what the layer kept, or less than that where some of it was let go."""
    collected: int = 0
    """Contributions of the layer so far."""
    gradient: int = 0
    """The one being made."""
    exchange: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMemory:
    """One layer in backward."""

    kept: int
    """Bytes kept for it since forward."""
    again: int
    """Bytes computed again."""
    mlp: tuple[Phase, ...]
    """While its MLP is, moment by moment."""
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
        around, received = replace(root, collected=0), self._hidden
        if self.part.is_last:
            yield from self._of_head(in_flight, root, first)
            in_flight -= self.num_tokens * self.kernels.norm(self.decoder.hidden_size)
            around, received = root, 0  # the first gradient of a unit brings all of its buffer
        reducing = 0
        for number in reversed(range(len(layers))):
            layer, following = layers[number], layers[max(number - 1, 0)]
            # In the midst of layers that are alike, the ones before needed more.
            if [layer.kind] * 3 != [x.kind for x in (following, *layers[number + 1 : number + 3])]:
                after = sum(group.arriving_bytes for group in following.units[0] * bool(number))
                yield from self._of_layer(layer, in_flight, after, around, reducing)
            own = _Held.of(layer.units[0], self.num_microbatches)
            reducing = own.collected + own.reducing if own.reducing else 0
            # The gradient that came from the next stage is its output's, and stays to the end.
            in_flight += received - layer.kept
            received = 0
        yield {
            Kind.WHOLE_WEIGHTS: root.whole,
            Kind.CONTRIBUTIONS: root.collected + max(root.largest, root.reducing, reducing),
            Kind.ACTIVATIONS: in_flight,
            Kind.HEAD: self._waiting,
        }

    def _of_layer(
        self, layer: LayerMemory, in_flight: int, after: int, root: _Held, reducing: int
    ) -> Iterator[Moment]:
        """Its MLP, then its attention, in backward.

        ``after`` are whole weights on their way, ``reducing`` contributions that came before.
        """
        own, *experts = (_Held.of(unit, self.num_microbatches) for unit in layer.units)
        whole, kept = root.whole + own.whole + after, in_flight + layer.again
        for phase in layer.mlp:
            yield {
                Kind.WHOLE_WEIGHTS: whole + sum(held.whole for held in experts),
                Kind.CONTRIBUTIONS: root.collected
                + phase.collected
                + max(phase.gradient, reducing),
                Kind.ACTIVATIONS: kept + phase.activations,
                Kind.EXCHANGE: phase.exchange,
                Kind.HEAD: self._waiting,
            }
        reducing = sum(held.collected + held.reducing for held in experts) or reducing
        yield {
            Kind.WHOLE_WEIGHTS: whole,
            Kind.CONTRIBUTIONS: root.collected + own.collected + max(own.largest, reducing),
            Kind.ACTIVATIONS: kept + layer.attention,
            Kind.EXCHANGE: self.kv_bytes,
            Kind.HEAD: self._waiting,
        }

    def _of_head(self, in_flight: int, root: _Held, last: _Held) -> Iterator[Moment]:
        decoder, kernels = self.decoder, self.kernels
        yield {
            Kind.WHOLE_WEIGHTS: root.whole,
            Kind.ACTIVATIONS: in_flight,
            Kind.HEAD: head_bytes(decoder, kernels.element_bytes, self.num_tokens),
        }
        yield {
            Kind.WHOLE_WEIGHTS: root.whole + last.whole,
            Kind.CONTRIBUTIONS: root.collected,
            Kind.ACTIVATIONS: in_flight,
            Kind.HEAD: self._hidden + self._head_gradient,
        }
        yield {
            Kind.WHOLE_WEIGHTS: root.whole + last.whole,
            Kind.CONTRIBUTIONS: root.collected,
            Kind.ACTIVATIONS: in_flight + final_norm_bytes(decoder, kernels, self.num_tokens),
            Kind.HEAD: self._waiting,
        }

    @property
    def _waiting(self) -> int:
        """Bytes of the gradient that the head makes of a table which is the embedding's too: it
        waits for the embedding's, which comes last."""
        is_tied = self.decoder.tie_word_embeddings and self.part.is_first and self.part.is_last
        return self._head_gradient * is_tied

    @property
    def _head_gradient(self) -> int:
        """Bytes of the gradient that the head makes of its weight."""
        return head_gradient_bytes(self.decoder) * self.kernels.element_bytes // FP32_BYTES

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
            mlp=tuple(self._mlp(layer, units)),
            attention=attention - mlp_bytes(*shape) + self.scratch.attention(layer),
            units=units,
        )

    def _mlp(self, layer: int, units: tuple[tuple[Group, ...], ...]) -> Iterator[Phase]:
        decoder, shape = self.decoder, (self.decoder, self.kernels, self.num_tokens)
        own, *experts = (_Held.of(unit, self.num_microbatches) for unit in units)
        scratch = self.scratch.mlp(layer)
        if not decoder.sparse_layers[layer]:
            activations = mlp_backward_bytes(*shape) + scratch
            yield Phase(activations=activations, collected=own.collected, gradient=own.largest)
            return
        mixture = MixtureBackward.of(*shape, recompute=self.recompute)
        before = own.collected if mixture.shared is not None else 0
        after = before + sum(held.collected for held in experts)
        if mixture.shared is not None:
            activations = mixture.shared + scratch
            yield Phase(activations=activations, collected=before, gradient=own.largest)
        yield Phase(activations=mixture.combining, collected=before)
        yield Phase(activations=mixture.moving, collected=before, exchange=self.expert_bytes)
        yield Phase(activations=mixture.inside + scratch, collected=after)
        largest = max((held.largest for held in experts), default=0)
        yield Phase(activations=mixture.before + scratch, collected=after, gradient=largest)


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
