"""Fixtures that every room's tests share."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from shoal_actors.driver import Cluster, open_cluster
from tests.ranks import RankPool

# The machine may be busy: no example has a deadline, and slow ones are no mistake. Examples are the
# same in each run, so that whoever breaks a property is the one whose tests fail.
settings.register_profile(
    "busy", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("busy")


@pytest.fixture(autouse=True)
def same_draws() -> None:
    """What a test draws without a seed is the same in whatever order the files come."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Gloo rank processes for the whole session."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def ray_session() -> Iterator[Cluster]:
    """One local Ray for the whole session, which shares its cores among four places."""
    with open_cluster(num_cpus=4) as cluster:
        yield cluster


def pytest_configure() -> None:
    """Have commands under test hear Ctrl-C.

    A shell without job control starts what it puts in the background with SIGINT ignored, and
    whatever a process ignores, those that it starts ignore as well.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
