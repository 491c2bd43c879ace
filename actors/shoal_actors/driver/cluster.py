"""The Ray cluster that a driver uses: the one that RAY_ADDRESS names, else one of its own.

A cluster of our own lives on this machine for as long as the driver. The address file that a killed
``ray start`` leaves behind is never consulted: without RAY_ADDRESS nothing is looked for.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import ray
from ray.exceptions import RayError

import shoal
import shoal_actors
from shoal.errors import ConfigError
from shoal.plan import Machine
from shoal_actors.driver.stop import hangups_withheld

CONNECT_TIMEOUT_S = 5.0
"""Ray itself would try a dead address for two minutes."""

ENVIRONMENT = {
    # One poll of the workers takes milliseconds, so failures and the end are noticed sooner.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    # Its only deed here would be a warning at each start: a run resumes from its folder anyway.
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    # Places of workers, which are there when they are asked for: whoever waits for a cluster that
    # grows does so before. Longer, and one that was lost meanwhile would be waited for.
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "20",
    # Relative paths in a worker mean what they mean in the driver.
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    # CPU workers beside GPUs keep CUDA_VISIBLE_DEVICES; Ray warns unless told which.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Pieces of streams on their way from a frontend to Serve's proxy: half of the CPU time, and of
    # the delay of the first, that they take as objects of Ray's.
    "RAY_SERVE_PROXY_USE_GRPC": "1",
}
"""Settings of Ray that it takes from the environment only."""

_OWN_ENVIRONMENT = {
    # A proxy that is not ready in time is killed, and serving fails with it; Ray's own 5 s are too
    # few to import what it needs while others use the machine.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "50",
    # What replicas behind HAProxy wait for at the end, so that the proxies of other nodes hear of
    # it: here there are none.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
}
"""And those of a cluster of our own, on this machine alone."""

_HA_PROXY_ENVIRONMENT = {
    # A frontend then writes to HAProxy's connection itself, and waits for a client that does not
    # read until its limits end it. In a thread beside Ray's it would write to a queue that takes
    # everything at once.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
}
"""And those of such a cluster with HAProxy before the frontends."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What a cluster has to place actors on."""

    is_own: bool
    """Whether it was started by this process and ends with it."""

    nodes: tuple[Mapping[str, float], ...]
    """Resources of each living node that is to stay (``CPU``, ``GPU``)."""

    free: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Of these, what nobody occupies at the moment, by the id of the node."""

    limit: Mapping[str, float] | None
    """Resources it may grow to, where an autoscaler says so."""

    @property
    def has_gpus(self) -> bool:
        """Whether any node has a GPU, or may come with one."""
        return any(node.get("GPU", 0) >= 1 for node in (*self.nodes, self.limit or {}))

    @property
    def machine(self) -> Machine:
        """What its nodes can do; their CPUs are taken to be like this machine's."""
        return replace(Machine.here(), has_cuda=self.has_gpus)

    def num_places(self, worker: Mapping[str, float]) -> int:
        """How many workers of these resources fit at most, now or once it has grown."""
        if self.limit is not None:
            return num_fitting(self.limit, worker)
        return sum(num_fitting(node, worker) for node in self.nodes)

    def free_places(self, worker: Mapping[str, float], own: Mapping[str, int]) -> tuple[int, ...]:
        """How many workers fit into each node right now, as ``places_in_order`` gives them.

        Beside what runs already, but for ``own``: so many such workers on each node, by its id.
        """
        return places_in_order(
            (
                {name: node.get(name, 0) + own.get(key, 0) * worker[name] for name in worker}
                for key, node in self.free.items()
            ),
            worker,
        )

    @property
    def own_node(self) -> str:
        """The id of the node that this process is on."""
        node: str = ray.get_runtime_context().get_node_id()
        return node

    def leaving(self) -> dict[str, int]:
        """Nodes that are to leave, by id, each with the time when it is gone.

        In milliseconds since 1970; 0 where none was said.
        """
        return _leaving()

    def now(self) -> Cluster:
        """The same cluster as it is now."""
        return _survey(is_own=self.is_own)


def num_fitting(resources: Mapping[str, float], worker: Mapping[str, float]) -> int:
    """How many workers of these resources fit into ``resources``."""
    return min(int(resources.get(name, 0) // amount) for name, amount in worker.items())


def places_in_order(
    nodes: Iterable[Mapping[str, float]], worker: Mapping[str, float]
) -> tuple[int, ...]:
    """How many workers of these resources fit into each node, in the order of a gang's ranks.

    Ray fills one node after the other, and next the one that would have the largest part of its
    resources left beside a single worker.
    """

    def left(node: Mapping[str, float]) -> float:
        return sum(1 - amount / node[name] for name, amount in worker.items())

    fitting = [node for node in nodes if num_fitting(node, worker)]
    return tuple(num_fitting(node, worker) for node in sorted(fitting, key=left, reverse=True))


def is_elsewhere() -> bool:
    """Whether a run will use a cluster that exists, rather than one of its own."""
    return ray.is_initialized() or os.environ.get("RAY_ADDRESS") not in (None, "local")


@contextmanager
def open_cluster(*, num_cpus: int) -> Iterator[Cluster]:
    """Connect to the cluster of RAY_ADDRESS, or start one with at least ``num_cpus`` places.

    A connection that this process has already is used and left open. Raises ConfigError where
    RAY_ADDRESS names nothing that answers.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if ray.is_initialized():
        yield _survey(is_own=False)
        return
    is_own = not is_elsewhere()
    if is_own:
        _start(num_cpus)
    else:
        _connect(os.environ["RAY_ADDRESS"])
    try:
        yield _survey(is_own=is_own)
    finally:
        ray.shutdown()


def _start(num_cpus: int) -> None:
    if os.environ.get("RAY_AUTH_MODE", "token") == "token":
        # Ray turns authentication on for a local cluster. With a token in the environment, which
        # only this process and its children know, it leaves the user's home alone.
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    own = dict(_OWN_ENVIRONMENT)
    if os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1":
        own |= _HA_PROXY_ENVIRONMENT
    for name, value in own.items():
        os.environ.setdefault(name, value)
    with hangups_withheld():
        ray.init(
            address="local",
            num_cpus=max(num_cpus, len(os.sched_getaffinity(0))),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )


def _connect(address: str) -> None:
    _probe(address)
    variables = dict(ENVIRONMENT)
    roots = source_roots()
    if roots:
        variables["PYTHONPATH"] = os.pathsep.join(roots)
    try:
        ray.init(
            address=address,
            runtime_env={"env_vars": variables},
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except (ConnectionError, ValueError, RayError) as error:  # the last for a wrong token
        raise ConfigError("RAY_ADDRESS", address, str(error), _REMEDY) from error


_REMEDY = "Give the address of a running cluster, or unset it to use this machine alone"


def _probe(address: str) -> None:
    """Refuse an address where nothing listens."""
    if "://" in address:
        raise ConfigError(
            "RAY_ADDRESS",
            address,
            "the driver must run on a node of the cluster",
            "Use ray job submit, or give host:port on such a node",
        )
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        return  # a name such as auto, which Ray looks up
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise ConfigError("RAY_ADDRESS", address, f"nothing answers: {error}", _REMEDY) from error


def _survey(*, is_own: bool) -> Cluster:
    state, leaving = ray._private.state.state, _leaving()
    nodes = {
        node["NodeID"]: node["Resources"]
        for node in ray.nodes()
        if node["Alive"] and node["NodeID"] not in leaving
    }
    free = state.available_resources_per_node()
    return Cluster(
        is_own=is_own,
        nodes=tuple(nodes.values()),
        free={name: free.get(name, {}) for name in nodes},
        limit=state.get_max_resources_from_cluster_config(),
    )


def _leaving() -> dict[str, int]:
    nodes: dict[str, int] = ray._private.state.state.get_draining_nodes()
    return nodes


def source_roots() -> list[str]:
    """Folders to import Shoal from where it runs from its sources; none where it is installed."""
    roots = {str(Path(package.__path__[0]).parent) for package in (shoal, shoal_actors)}
    return sorted(root for root in roots if Path(root).name != "site-packages")
