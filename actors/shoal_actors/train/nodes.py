"""Whether a node is gone, before the cluster knows and until it does.

The cluster's head asks each node every few seconds, and gives it up after several answers are
missing, some 12 seconds later. Until then the places of a dead node look free, and a gang would be
sent there. A node that is well takes a connection at once.
"""

from __future__ import annotations

import socket
import time
from typing import Any

import ray

VERDICT_S = 40.0
"""Seconds for the head to give up a node that takes no connection."""

CONNECT_TIMEOUT_S = 3.0
"""Seconds for a node to take a connection."""

_LOOK_S = 0.5


def loss_of(node_id: str) -> str | None:
    """Why a node is gone, once the head knows it too; None where the node answers."""
    deadline = time.monotonic() + VERDICT_S
    while True:
        nodes = {node["NodeID"]: node for node in ray.nodes()}
        node = nodes.get(node_id)
        if node is None or not node["Alive"]:
            return (node or {}).get("DeathReasonMessage") or "it has left the cluster"
        if _answers(node):
            return None
        if time.monotonic() > deadline:
            return "it takes no connection"
        time.sleep(_LOOK_S)


def _answers(node: dict[str, Any]) -> bool:
    address = (node["NodeManagerAddress"], node["NodeManagerPort"])
    try:
        socket.create_connection(address, timeout=CONNECT_TIMEOUT_S).close()
    except OSError:
        return False
    return True
