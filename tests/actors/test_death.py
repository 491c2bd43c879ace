"""How a worker that could not tell has ended."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import ray
from ray.core.generated import common_pb2
from ray.exceptions import ActorDiedError, ActorUnavailableError, OutOfMemoryError, RayActorError
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError

from shoal_actors.driver import Cluster
from shoal_actors.train.death import death_of

ACTOR = bytes(16)


def _died(text: str, reason: int | None = None, reason_message: str = "") -> Any:
    cause = common_pb2.ActorDeathCause()
    cause.actor_died_error_context.error_message = text
    if reason is not None:
        cause.actor_died_error_context.node_death_info.reason = reason
        cause.actor_died_error_context.node_death_info.reason_message = reason_message
    return cause


def _out_of_memory(text: str) -> Any:
    cause = common_pb2.ActorDeathCause()
    cause.oom_context.error_message = text
    return cause


LOST = common_pb2.NodeDeathInfo.UNEXPECTED_TERMINATION
LEFT = common_pb2.NodeDeathInfo.AUTOSCALER_DRAIN_PREEMPTED


@pytest.mark.parametrize(
    ("cause", "kind", "words"),
    [
        (_died("exit type: SYSTEM_ERROR"), "ProcessDied", "killed or crashed"),
        (_died("its node", LOST, "no heartbeats"), "NodeLost", "was lost: no heartbeats"),
        (_died("its node", LEFT), "NodeLeft", "which was to leave the cluster, is gone"),
        (_out_of_memory("6.9GB used"), "OutOfMemory", "running out of memory"),
    ],
)
def test_a_worker_that_is_missed_is_judged_once_the_cluster_knows(
    cause: Any, kind: str, words: str
) -> None:
    alive = {"State": "ALIVE", "Address": {"NodeID": "n"}}
    entries = iter([alive, alive, {"State": "DEAD", "DeathCause": cause}])
    missed = ActorUnavailableError("Socket closed", ACTOR)
    death = death_of(
        WorkerHealthCheckFailedError("no", missed),
        look_up=lambda actor_id: next(entries),
        loss_of=lambda node_id: None,
    )
    assert death.kind == kind and words in death.message
    assert death.details and next(entries, None) is None


def test_a_worker_on_a_node_that_does_not_answer_is_lost_with_it() -> None:
    death = death_of(
        ActorUnavailableError("Socket closed", ACTOR),
        look_up=lambda actor_id: {"State": "ALIVE", "Address": {"NodeID": "n"}},
        loss_of=lambda node_id: f"{node_id} is gone",
    )
    assert (death.kind, death.message) == ("NodeLost", "its node was lost: n is gone")


def test_what_an_error_says_itself_is_not_looked_up() -> None:
    killed = death_of(WorkerHealthCheckFailedError("no", OutOfMemoryError("1 worker(s)")))
    assert (killed.kind, killed.details) == ("OutOfMemory", "1 worker(s)")
    context = common_pb2.ActorDiedErrorContext(actor_id=ACTOR, error_message="its node")
    context.node_death_info.reason = LEFT
    assert death_of(ActorDiedError(context)).kind == "NodeLeft"
    assert death_of(RuntimeError("odd")).kind == "ProcessDied"


def test_a_real_death_is_in_the_cluster_s_table(ray_session: Cluster) -> None:
    class Victim:
        def end(self) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

    victim = ray.remote(num_cpus=0)(Victim).remote()
    with pytest.raises(RayActorError) as error:
        ray.get(victim.end.remote())
    death = death_of(error.value)
    assert death.kind == "ProcessDied" and "Worker exit type" in death.details
