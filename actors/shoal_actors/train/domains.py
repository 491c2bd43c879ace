"""Whether ranks that should share fast links do.

Ray numbers the ranks of a node consecutively, and fills one node after the other. A domain of
consecutive ranks is therefore inside one node, or made of whole nodes, unless the two sizes do not
fit each other. That is known of places before there are workers on them, and looked at once more
when there are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from shoal.errors import Misplaced


def check_domains(nodes: Sequence[str], domain: int | None) -> None:
    """Refuse a domain that takes some ranks of a node and leaves others to another domain.

    ``nodes`` names each rank's node. Raises Misplaced.
    """
    if domain is None:
        return
    counts = Counter(nodes)
    start = _torn(counts.values(), domain)
    if start is not None:
        inside = nodes[start : start + domain]
        raise Misplaced(
            "cluster.nvlink_domain",
            domain,
            f"ranks {start} to {start + len(inside) - 1} would be spread over "
            f"{len(set(inside))} nodes that other domains use as well",
            f"Give a number that fits the nodes' {', '.join(map(str, counts.values()))} workers",
        )


def keeps_domains(places: Iterable[int], size: int, domain: int | None) -> bool:
    """Whether no domain of ``size`` workers is torn where they fill ``places``, node by node."""
    return domain is None or _torn(filled(places, size), domain) is None


def filled(places: Iterable[int], size: int) -> Iterator[int]:
    """How many of ``size`` workers each node gets, where they fill ``places`` in their order."""
    for count in places:
        if size > 0:
            yield min(count, size)
        size -= count


def _torn(counts: Iterable[int], domain: int) -> int | None:
    """The first rank of a domain that shares a node with another without either holding the other.

    ``counts`` are the workers of each node, in the order of ranks.
    """
    first = 0
    for count in counts:
        end = first + count
        is_inside = first // domain == (end - 1) // domain
        if not is_inside and first % domain:
            return first - first % domain
        if not is_inside and end % domain:
            return end - end % domain
        first = end
    return None
