"""Where ranks land against where fast links are."""

from __future__ import annotations

import pytest

from shoal.errors import ConfigError
from shoal_actors.train.domains import check_domains


@pytest.mark.parametrize(
    ("nodes", "domain"),
    [
        ("aaaa", None),
        ("aaaa", 2),
        ("aabb", 2),
        ("aabbccdd", 4),
        ("aaaabb", 2),
        ("ab", None),
        ("aaab", 1),
        ("aaab", 4),
    ],
)
def test_domains_within_nodes_and_of_whole_nodes(nodes: str, domain: int | None) -> None:
    check_domains(list(nodes), domain)


@pytest.mark.parametrize(("nodes", "domain"), [("aaab", 2), ("aaabbb", 2), ("aabbbb", 3)])
def test_a_domain_across_parts_of_nodes_is_refused(nodes: str, domain: int) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.nvlink_domain"):
        check_domains(list(nodes), domain)
