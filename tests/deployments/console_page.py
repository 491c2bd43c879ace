"""The console in a real browser, as its tests open and use it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shoal.inference import Request
from tests.deployments.browser import Browser, Page
from tests.deployments.server import Served

STREAM_S = 0.01
"""Time of a step where something is to happen before an answer's end."""


@contextmanager
def opened(browser: Browser, url: str) -> Iterator[Page]:
    """The console at ``url``; at the end it must have made no mistake that the browser noticed."""
    page = Page(browser)
    page.goto(url)
    try:
        yield page
        assert page.complaints() == []
    finally:
        page.close()


def ask(page: Page, question: str = "Hi") -> None:
    """Type a question and send it."""
    page.evaluate("document.querySelector('#question').focus()")
    page.type(question)
    page.press("Enter")


def wait_for_answers(page: Page, number: int = 1) -> None:
    """Wait until so many answers have ended."""
    page.wait_for(
        f"document.querySelectorAll('.answer').length === {number} && "
        "document.querySelector('#turns').getAttribute('aria-busy') === 'false'"
    )


def ask_and_hold(page: Page, served: Served) -> None:
    """Have an answer begin and stand still, as long as the engine is stalled."""
    served.engine.step_s = STREAM_S
    page.fill("[name=most]", "400")
    ask(page)
    page.wait_for("document.querySelector('.answer .text').textContent.length > 3")
    served.engine.is_stalled = True


def answers(page: Page) -> list[str]:
    """The texts of all answers."""
    found = page.evaluate(
        "[...document.querySelectorAll('.answer > .text')].map((each) => each.textContent)"
    )
    return list(found)


def prompt_of(request: Request) -> str:
    """The text that a request asks to go on with."""
    return bytes(token for token in request.prompt if token < 256).decode()


def num_polls(page: Page) -> int:
    """How often the page has asked for the replicas."""
    return len(
        [
            event
            for event in page.events("Network.requestWillBeSent")
            if event["request"]["url"].endswith("/stats")
        ]
    )


def polls_exceed(number: int) -> str:
    """An expression: whether the page has asked for the replicas more than ``number`` times."""
    return (
        f"performance.getEntriesByType('resource').filter((each) => "
        f"each.name.endsWith('/stats')).length > {number}"
    )
