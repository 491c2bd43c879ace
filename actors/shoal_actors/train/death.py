"""What became of a worker whose process can no longer tell: Ray's verdict, in our words.

A process that ends is missed at once, and its node says so. Where the node is gone nobody does, and
the verdict is waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.core.generated import common_pb2
from ray.exceptions import ActorUnavailableError, OutOfMemoryError, RayActorError

from shoal_actors.train.nodes import loss_of

PROCESS_DIED = "ProcessDied"
OUT_OF_MEMORY = "OutOfMemory"
NODE_LOST = "NodeLost"
NODE_LEFT = "NodeLeft"

VERDICT_S = 3.0
"""Seconds for a node that is well to tell of a worker's end."""

_LOOK_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """How a worker ended."""

    kind: str
    """One of the kinds above."""

    message: str
    """The same in a sentence."""

    details: str
    """What Ray says."""


def actor_table(actor_id: str) -> dict[str, Any]:
    """What the cluster's head notes about an actor."""
    entry: dict[str, Any] = ray._private.state.state.actor_table(actor_id)
    return entry


def death_of(
    error: BaseException,
    *,
    look_up: Callable[[str], dict[str, Any]] = actor_table,
    loss_of: Callable[[str], str | None] = loss_of,
) -> Death:
    """What an error of Ray's tells of a worker's death.

    ``look_up`` gives what the cluster notes about an actor, ``loss_of`` why a node is gone. Takes
    as long as the cluster needs to know.
    """
    error = getattr(error, "health_check_failure", error)
    if isinstance(error, OutOfMemoryError):
        return _out_of_memory(str(error))
    if not isinstance(error, RayActorError) or error.actor_id is None:
        return _process_died(str(error))
    if error.preempted:
        return _node_left(str(error))
    if isinstance(error, ActorUnavailableError):
        reason = loss_of(look_up(error.actor_id)["Address"]["NodeID"])
        if reason is not None:
            return Death(kind=NODE_LOST, message=node_lost(reason), details=str(error))
    deadline = time.monotonic() + VERDICT_S
    while (entry := look_up(error.actor_id)).get("State") != "DEAD":
        if time.monotonic() > deadline:
            return _process_died(str(error))
        time.sleep(_LOOK_S)
    return _judged(entry["DeathCause"], str(error))


def node_lost(reason: str) -> str:
    """The message about a rank whose node is gone for some reason."""
    return f"its node was lost: {reason}"


def _judged(cause: Any, error: str) -> Death:
    if cause.HasField("oom_context"):
        return _out_of_memory(cause.oom_context.error_message)
    died = cause.actor_died_error_context
    if not died.HasField("node_death_info"):
        return _process_died(died.error_message or error)
    if died.node_death_info.reason == common_pb2.NodeDeathInfo.AUTOSCALER_DRAIN_PREEMPTED:
        return _node_left(died.error_message)
    return Death(
        kind=NODE_LOST,
        message=node_lost(died.node_death_info.reason_message),
        details=died.error_message,
    )


def _process_died(details: str) -> Death:
    message = "it was killed or crashed, or the kernel had no memory left for it"
    return Death(kind=PROCESS_DIED, message=message, details=details)


def _out_of_memory(details: str) -> Death:
    message = "Ray killed it, for its node was running out of memory"
    return Death(kind=OUT_OF_MEMORY, message=message, details=details)


def _node_left(details: str) -> Death:
    message = "its node, which was to leave the cluster, is gone"
    return Death(kind=NODE_LEFT, message=message, details=details)
