"""Fixtures that every room's tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Gloo rank processes for the whole session."""
    pool = RankPool()
    yield pool
    pool.close()
