"""A headless Chromium of this machine's, driven by Playwright."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, sync_playwright

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
DEADLINE_S = 60.0


def executable() -> str:
    """Where Chromium is; skips the test where there is none.

    The environment variable SHOAL_BROWSER names it, and then it has to be there.
    """
    wanted = os.environ.get("SHOAL_BROWSER")
    found = [wanted] if wanted else [path for path in map(shutil.which, NAMES) if path]
    if not found:
        pytest.skip(
            "There is no Chromium here: apt-get install chromium-headless-shell, or name a browser "
            "by the environment variable SHOAL_BROWSER."
        )
    return found[0]


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser until the end of the block; this thread runs no event loop of its own meanwhile."""
    path = executable()
    with sync_playwright() as playwright:
        # Many a container's /dev/shm is too small for it.
        browser = playwright.chromium.launch(
            executable_path=path, args=["--disable-dev-shm-usage", "--no-proxy-server"]
        )
        yield browser
        browser.close()


@contextmanager
def opened(browser: Browser, url: str) -> Iterator[Page]:
    """The page at ``url``, without cookies, storage or cache of another's.

    At the end it must have made no mistake that the browser noticed: exceptions that nobody caught,
    breaches of the security policy, other errors and warnings.
    """
    complaints: list[str] = []

    def listen(message: ConsoleMessage) -> None:
        # Answers with a status that is not 200 are no mistakes of the page.
        is_answer = message.text.startswith("Failed to load resource")
        if message.type in ("error", "warning") and not is_answer:
            complaints.append(message.text)

    with browser.new_context() as context:
        context.set_default_timeout(DEADLINE_S * 1000)
        page = context.new_page()
        page.on("console", listen)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(url)
        yield page
        page.evaluate("0")  # what came before it has been heard then
        assert complaints == []
