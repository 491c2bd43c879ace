"""How long a step takes by the stated rates: an estimate, with its parts.

A stage computes its microbatches one after the other. What happens beside that:

    waited for     keys and values that are gathered, and rows on their way to experts: the layer
                   cannot go on without them
    overlapped     keys and values in a ring, with attention; messages between stages, with other
                   microbatches; a unit's weights and gradients, with the compute of its neighbours.
                   They cost what exceeds the compute that they can hide behind: all microbatches'
                   where they travel with each, one forward's (weights) or one backward's
                   (gradients) where they travel once a step
    bubble         waiting of a stage for others, a share of its time that the schedule fixes
    messages       of the first microbatch on its way through the stages and back
    update         weights, gradients and moments are read, weights and moments written; Muon's
                   matrices travel, and its products, shared among ranks, are left out

Products in MXFP8 count as those in bf16: what their emulation takes besides is left out.

Collectives of one stage share its links: their times add up within a class of links, and classes
do not overlap with each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from shoal.models import Part
from shoal.parallel.pipeline.timeline import bubble_share
from shoal.plan.group import counted
from shoal.plan.links import link_of
from shoal.plan.rates import Rates
from shoal.plan.stage import Layout, StagePlan
from shoal.plan.traffic import Stream, Traffic
from shoal.plan.work import Work, part_work
from shoal.topology import MESH_AXES

PARTS = (
    "dense",
    "attention",
    "experts",
    "head",
    "again",
    "exchange",
    "weights",
    "gradients",
    "bubble",
    "messages",
    "update",
)
"""What a step's time is made of."""

_FORWARD_SHARE = 1 / 3
"""Of a microbatch's compute; backward is the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of a step on the stage that takes longest, and what they are made of."""

    stage: int
    """The stage."""

    dense_s: float
    attention_s: float
    experts_s: float
    head_s: float
    again_s: float
    """Computing: projections and dense MLPs, attention, routed experts, the head with its loss, and
    what recomputation repeats."""

    exchange_s: float
    """Waiting for keys and values, and for rows of tokens on their way to experts and back."""
    weights_s: float
    """Waiting for weights beyond what hides behind computing."""
    gradients_s: float
    """Likewise for gradients."""
    bubble_s: float
    messages_s: float
    update_s: float

    tokens: int
    """Of the step, over all ranks."""

    useful_flops: float
    """Floating-point operations of the step, without those repeated."""
    attainable_flops: float
    """What all ranks can do in a second in large matrix products."""

    @property
    def compute_s(self) -> float:
        """All computing."""
        return self.dense_s + self.attention_s + self.experts_s + self.head_s + self.again_s

    @property
    def total_s(self) -> float:
        """The step."""
        return sum(self.parts.values())

    @property
    def tokens_per_s(self) -> float:
        """Of all ranks together."""
        return self.tokens / self.total_s

    @property
    def flops_share(self) -> float:
        """What the step makes of the attainable rate."""
        return self.useful_flops / (self.total_s * self.attainable_flops)

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by part, in the order in which they are told."""
        return {name: getattr(self, f"{name}_s") for name in PARTS}

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            **asdict(self),
            "total_s": self.total_s,
            "tokens_per_s": self.tokens_per_s,
            "flops_share": self.flops_share,
        }

    @staticmethod
    def of(layout: Layout, stages: Sequence[StagePlan], rates: Rates, device: str) -> StepTime:
        """The estimate for a plan; ``stages`` may be those that can take longest only.

        Of bare stages it is a bound: what there would be to wait for weights and gradients is left
        out.
        """
        return max((_Stage(layout, stage, rates, device).time() for stage in stages), key=_total)


def _total(time: StepTime) -> float:
    return time.total_s


class _Stage:
    """One stage in a step."""

    def __init__(self, layout: Layout, stage: StagePlan, rates: Rates, device: str) -> None:
        self._layout = layout
        self._stage = stage
        self._rates = rates
        self._device = device
        self._traffic = tuple(stage.traffic() if stage.groups else stage.exchange())

    def time(self) -> StepTime:
        """Its time, and what that is made of."""
        layout, batches = self._layout, self._layout.batches
        work, flops = self._work(), self._rates.flops[layout.precision.compute]
        for_attention = self._attention_flops()
        attention = work.attention / for_attention
        again = work.again / flops + work.attention_again / for_attention
        computing = (work.dense + work.experts + work.head) / flops + attention + again
        exchange = self._exchange(attention)
        weights, gradients = self._units(computing + exchange)
        working = computing + exchange + weights + gradients
        bubble = bubble_share(layout.stages, batches.num_microbatches)
        return StepTime(
            stage=self._stage.stage,
            dense_s=work.dense / flops,
            attention_s=attention,
            experts_s=work.experts / flops,
            head_s=work.head / flops,
            again_s=again,
            exchange_s=exchange,
            weights_s=weights,
            gradients_s=gradients,
            bubble_s=working * bubble / (1 - bubble),
            messages_s=self._messages(working),
            update_s=self._update(),
            tokens=batches.tokens,
            useful_flops=self._useful_flops(),
            attainable_flops=flops * layout.topology.world_size,
        )

    def _work(self) -> Work:
        """Of one rank's microbatches."""
        layout = self._layout
        config, batches = layout.config, layout.batches
        tokens = float(self._stage.context.mean_tokens) * batches.num_microbatches
        again, total = config.train.recompute == "layer", Work()
        for part in self._stage.parts:
            total += part_work(layout.decoder, part, batches.seq_len, recompute=again)
        return total.times(tokens)

    def _useful_flops(self) -> float:
        """Of a whole step on all ranks."""
        decoder, batches = self._layout.decoder, self._layout.batches
        whole = Part(layers=range(decoder.num_layers))
        work = part_work(decoder, whole, batches.seq_len, recompute=False)
        return batches.tokens * work.useful

    def _attention_flops(self) -> float:
        """Rate of attention. On GPUs ranks that share sequences compute it in fp32."""
        in_fp32 = self._layout.topology.context > 1 and self._device == "cuda"
        dtype = torch.float32 if in_fp32 else self._layout.precision.compute
        return self._rates.flops[dtype]

    def _seconds(self, traffic: Traffic) -> float:
        stream = traffic.stream
        links = {"inside": self._rates.inside, "outside": self._rates.outside}
        link = links[link_of(stream, self._layout.topology)]
        return link.seconds(traffic.sent_bytes, traffic.count, stream.group_size)

    def _sum(self, wanted: Callable[[Stream], bool]) -> float:
        return sum(self._seconds(one) for one in self._traffic if wanted(one.stream))

    def _exchange(self, attention: float) -> float:
        """Waiting inside layers."""
        sequences = self._sum(lambda stream: stream.axis == "context")
        if self._layout.config.parallel.context_exchange == "ring":
            sequences = max(sequences - attention, 0.0)
        return sequences + self._sum(lambda stream: stream.axis == "expert")

    def _units(self, computing: float) -> tuple[float, float]:
        """Waiting for weights, and for gradients, that do not hide behind ``computing``."""
        microbatch = computing / self._layout.batches.num_microbatches
        often = {what: self._of_units(what, "each microbatch") for what in ("weights", "gradients")}
        together = sum(often.values())
        share = max(together - computing, 0.0) / together if together else 0.0
        refreshed = self._of_units("weights", "once a step")
        summed = self._of_units("gradients", "once a step")
        swapped = self._sum(lambda one: one.axis == "pipeline" and one.what == "gradients")
        return (
            share * often["weights"] + max(refreshed - _FORWARD_SHARE * microbatch, 0.0),
            share * often["gradients"]
            + max(summed - (1 - _FORWARD_SHARE) * microbatch, 0.0)
            + swapped,
        )

    def _of_units(self, what: str, when: str) -> float:
        def wanted(stream: Stream) -> bool:
            return stream.axis in MESH_AXES and (stream.what, stream.when) == (what, when)

        return self._sum(wanted)

    def _messages(self, working: float) -> float:
        """The first microbatch's way and back, and what no computing hides."""
        hops = 2 * (self._layout.stages.num_chunks - 1)
        sent = [one for one in self._traffic if one.stream.what.endswith("activations")]
        seconds = [self._seconds(one) for one in sent]
        if not sent:
            return 0.0
        microbatches = self._layout.batches.num_microbatches * self._layout.stages.virtual
        return hops * max(seconds) / microbatches + max(sum(seconds) - working, 0.0)

    def _update(self) -> float:
        """Weights and moments are read and written, gradients read; Muon's updates travel, and
        what experts' biases follow."""
        groups, precision = counted(self._stage.every_group), self._layout.precision
        held = sum(n * group.run(group.placements.optimizer) for group, n in groups)
        per_element = 2 * precision.main_weights.itemsize + precision.main_gradients.itemsize
        optimizer = self._layout.config.optimizer
        num_moments = {"adamw": 2, "muon": 1, "sgd": int(bool(optimizer.momentum))}[optimizer.kind]
        per_element += 2 * num_moments * precision.moments.itemsize
        travel = self._sum(lambda stream: stream.what in ("updates", "loads of experts"))
        return held * per_element / self._rates.memory_bytes_per_s + travel
