"""The console in a real browser, as its tests open and use it."""

from __future__ import annotations

import re
import time

from playwright.sync_api import Page

from shoal.inference import Request
from tests.deployments.browser import DEADLINE_S
from tests.deployments.server import Served

STREAM_S = 0.01
"""Time of a step where something is to happen before an answer's end."""


def text(page: Page, selector: str) -> str:
    """What the first element that matches says."""
    return page.text_content(selector) or ""


def wait_for(page: Page, expression: str, within_s: float = DEADLINE_S) -> None:
    """Wait until a JavaScript expression holds.

    Asked from outside, because the page's security policy forbids to evaluate a text within it.
    """
    deadline = time.monotonic() + within_s
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, f"did not come to hold: {expression}"
        page.wait_for_timeout(30)


def wait_for_text(page: Page, selector: str, words: str) -> None:
    """Wait until some element that matches contains ``words``."""
    exactly = re.compile(re.escape(words))
    page.locator(selector, has_text=exactly).first.wait_for(state="attached")


def ask(page: Page, question: str = "Hi") -> None:
    """Type a question and send it."""
    page.focus("#question")
    page.keyboard.insert_text(question)
    page.keyboard.press("Enter")


def wait_for_answers(page: Page, number: int = 1) -> None:
    """Wait until so many answers have ended."""
    wait_for(
        page,
        f"document.querySelectorAll('.answer').length === {number} && "
        "document.querySelector('#turns').getAttribute('aria-busy') === 'false'",
    )


def ask_and_hold(page: Page, served: Served) -> None:
    """Have an answer begin and stand still, as long as the engine is stalled."""
    served.engine.step_s = STREAM_S
    page.fill("[name=most]", "400")
    ask(page)
    wait_for(page, "document.querySelector('.answer .text').textContent.length > 3")
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


NUM_POLLS = (
    "performance.getEntriesByType('resource').filter((each) => each.name.endsWith('/stats')).length"
)
"""An expression: how often the page has asked for the replicas."""
