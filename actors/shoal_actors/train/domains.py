"""Whether ranks that should share fast links do.

Ray numbers the ranks of a node consecutively. A domain of consecutive ranks is therefore inside one
node, or made of whole nodes, unless the two sizes do not fit each other.
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.errors import ConfigError


def check_domains(nodes: Sequence[str], domain: int | None) -> None:
    """Refuse a domain that takes some ranks of a node and leaves others to another domain.

    ``nodes`` names each rank's node. Raises ConfigError.
    """
    size = domain or len(nodes)
    for start in range(0, len(nodes), size):
        inside = nodes[start : start + size]
        for node in dict.fromkeys(inside):
            if inside.count(node) not in (len(inside), nodes.count(node)):
                raise ConfigError(
                    "cluster.nvlink_domain",
                    size,
                    f"ranks {start} to {start + len(inside) - 1} would be spread over "
                    f"{len(set(inside))} nodes that other domains use as well",
                    f"Give a number that fits the nodes' {_counts(nodes)} workers",
                )


def _counts(nodes: Sequence[str]) -> str:
    return ", ".join(str(nodes.count(node)) for node in dict.fromkeys(nodes))
