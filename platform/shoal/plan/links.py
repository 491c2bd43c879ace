"""Which links a step's traffic takes: those inside a domain, or those between domains."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from shoal.plan.traffic import Stream, Traffic
from shoal.topology import Topology

LinkClass = Literal["inside", "outside"]


def link_of(stream: Stream, topology: Topology) -> LinkClass:
    """The links that ``stream`` takes, some of its ranks at least."""
    if stream.axis == "pipeline":
        return "outside" if _crosses(stream, topology) else "inside"
    return "outside" if stream.axis == "outer" else "inside"


def sent_by_link(traffic: Iterable[Traffic], topology: Topology) -> dict[LinkClass, int]:
    """Bytes that each rank has to send in a step, at least, by class of links."""
    sent: dict[LinkClass, int] = {"inside": 0, "outside": 0}
    for one in traffic:
        sent[link_of(one.stream, topology)] += one.sent_bytes
    return sent


def _crosses(stream: Stream, topology: Topology) -> bool:
    """Whether a message leaves its sender's domain."""
    source, last = stream.stage, topology.pipeline - 1
    if stream.what == "gradients":  # of a tied table, between the ends
        target = last - source
    else:
        step = 1 if stream.what == "activations" else -1
        target = (source + step) % topology.pipeline
    domains = (stage * topology.stage // topology.domain for stage in (source, target))
    return len(set(domains)) > 1
