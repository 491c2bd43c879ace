"""One server for each file of tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page

from tests.deployments.browser import chromium, opened
from tests.deployments.console_page import wait_for_text
from tests.deployments.fake_engine import by_hash
from tests.deployments.server import Served, serve


@pytest.fixture(scope="module")
def module_server() -> Iterator[Served]:
    """A server with the default settings for a whole file."""
    with serve() as served:
        yield served


@pytest.fixture
def served(module_server: Served) -> Iterator[Served]:
    """That server with its engine as new; at the end nothing may be left of any request."""
    engine = module_server.engine
    engine.next_token = by_hash
    engine.step_s = engine.submit_s = 0.0
    engine.is_stalled = False
    engine.failure = engine.refusal = None
    engine.durable_problem = engine.journal = None
    engine.fingerprint = "fp1"
    engine.aborted.clear()
    engine.submitted.clear()
    engine.requests.clear()
    yield module_server
    module_server.assert_idle()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One Chromium for the whole file."""
    with chromium() as browser:
        yield browser


@pytest.fixture
def page(browser: Browser, served: Served) -> Iterator[Page]:
    """The console of the file's server."""
    with opened(browser, f"{served.url}/") as page:
        wait_for_text(page, "#summary", "1 of 1 replicas up")
        page.fill("[name=most]", "40")
        yield page
