"""Who may use the console, and how: keys, keyboard, screen readers, screens of all widths."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from playwright.sync_api import Browser, Page
from starlette.applications import Starlette
from starlette.routing import Mount

from shoal.config import AuthSettings, ServeSettings
from tests.deployments.browser import opened
from tests.deployments.console_page import (
    NUM_POLLS,
    answers,
    ask,
    text,
    wait_for,
    wait_for_answers,
    wait_for_text,
)
from tests.deployments.fake_engine import spelling
from tests.deployments.server import Served, serve


def test_a_key_is_asked_for_and_kept_in_the_tab_alone(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONSOLE_KEYS", "secret")
    settings = ServeSettings(auth=AuthSettings(keys_variable="CONSOLE_KEYS"))

    def below_a_prefix(app: Any) -> Starlette:
        return Starlette(routes=[Mount("/models/a", app)])

    with (
        serve(settings, wrap=below_a_prefix) as served,
        opened(browser, f"{served.url}/models/a/") as page,
    ):
        wait_for(page, "document.querySelector('#key-dialog').open")
        assert text(page, "#key-reason").startswith("No API key was given.")
        page.keyboard.insert_text("guess")
        page.keyboard.press("Enter")
        wait_for_text(page, "#key-reason", "The API key is not one of this server's.")
        page.keyboard.press("Escape")
        wait_for_text(page, "#stats-problem", "The API key is not one of this server's.")
        ask(page)
        wait_for(page, "document.querySelector('#key-dialog').open")
        page.keyboard.insert_text("secret")
        page.keyboard.press("Enter")
        wait_for_answers(page)
        assert len(answers(page)[0]) > 3
        wait_for_text(page, "#summary", "1 of 1 replicas up")
        assert not page.evaluate("document.querySelector('#key-dialog').open")
        assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
        assert "secret" not in page.evaluate("document.documentElement.outerHTML")
        page.goto(f"{served.url}/models/a/")
        wait_for_text(page, "#summary", "1 of 1 replicas up")


def test_who_puts_the_question_for_a_key_aside_is_left_alone(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONSOLE_KEYS", "secret")
    settings = ServeSettings(auth=AuthSettings(keys_variable="CONSOLE_KEYS"))
    with serve(settings) as served, opened(browser, f"{served.url}/") as page:
        wait_for(page, "document.querySelector('#key-dialog').open")
        page.click("#key-cancel")
        wait_for_text(page, "#stats-problem", "No API key was given.")
        before = page.evaluate(NUM_POLLS)
        wait_for(page, f"{NUM_POLLS} > {before}")
        assert not page.evaluate("document.querySelector('#key-dialog').open")
        page.click("#change-key")
        page.keyboard.insert_text("secret")
        page.keyboard.press("Enter")
        wait_for_text(page, "#summary", "1 of 1 replicas up")
        assert text(page, "#stats-problem") == ""


def _controls(page: Page) -> list[tuple[str, str]]:
    """(role, name) of everything that can be operated, as assistive technology is told it."""
    nodes = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")["nodes"]
    roles = ("button", "textbox", "spinbutton", "checkbox", "link", "DisclosureTriangle")
    return [
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in nodes
        if not node["ignored"] and node["role"]["value"] in roles
    ]


def test_everything_can_be_done_by_keyboard_and_has_a_name(page: Page, served: Served) -> None:
    served.engine.next_token = spelling("word", ends=True)
    ask(page)
    wait_for_answers(page)
    controls = _controls(page)
    assert len(controls) > 10
    assert [role for role, name in controls if not name.strip()] == []
    reached = set()
    for _ in range(30):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate(
                "document.activeElement.id || document.activeElement.name || "
                "document.activeElement.dataset.is || document.activeElement.tagName"
            )
        )
    assert reached >= {"question", "send", "clear", "turns", "system", "temperature", "most"}
    assert reached >= {"seed", "tints", "repeat", "summary", "change-key", "SUMMARY"}


@pytest.mark.parametrize("width", [320, 390, 1280])
def test_nothing_sticks_out_at_any_width(page: Page, served: Served, width: int) -> None:
    served.engine.next_token = spelling("w" * 120, ends=True)
    page.set_viewport_size({"width": width, "height": 700})
    ask(page, "y" * 120)
    wait_for_answers(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    box = page.evaluate("document.querySelector('#composer').getBoundingClientRect().toJSON()")
    assert box["bottom"] <= 700.5 and box["right"] <= width


_CONTRASTS = """(() => {
  const luminance = (colour) => {
    const parts = colour.match(/[0-9.]+/g).slice(0, 3).map((part) => part / 255);
    const [r, g, b] = parts.map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (element) => {
    const colour = getComputedStyle(element).backgroundColor;
    return colour === "rgba(0, 0, 0, 0)" ? ground(element.parentElement) : colour;
  };
  const found = {};
  for (const element of document.querySelectorAll("body *:not(template, option)")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (own && element.getClientRects().length > 0) {
      const [one, other] = [getComputedStyle(element).color, ground(element)].map(luminance);
      const contrast = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
      if (contrast < 4.5) {
        found[element.className || element.id || element.dataset.is] = contrast;
      }
    }
  }
  return found;
})()"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_told_from_its_ground(
    page: Page, served: Served, scheme: Literal["light", "dark"]
) -> None:
    page.set_viewport_size({"width": 1280, "height": 900})
    page.emulate_media(color_scheme=scheme)
    page.click("[name=tints]")
    ask(page)
    wait_for_answers(page)
    page.click(".answer [data-is=repeat]")
    wait_for_text(page, "[data-is=verdict]", "bit for bit")
    page.evaluate(
        "document.querySelectorAll('.answer .text span')"
        ".forEach((each, place) => { each.dataset.level = place % 5; })"
    )
    assert page.evaluate(_CONTRASTS) == {}
