"""The console in a real browser, before a server with a scripted engine."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from shoal.config import AuthSettings, ServeSettings
from shoal.errors import Overloaded
from shoal.inference import Limits, Request
from shoal_deployments.engine_client import EngineUnavailable, ReplicaHealth, ReplicaStats
from tests.deployments.browser import Browser, Page, chromium
from tests.deployments.fake_engine import FakeEngine, by_hash, spelling
from tests.deployments.server import Served, serve

STREAM_S = 0.01
"""Time of a step where something is to happen before an answer's end."""

LIMITS = Limits(vocab_size=257, context_length=100_000, num_blocks=25_000, block_size=4)
"""Room for an answer that does not end while the test lasts."""

CERTIFICATE = {
    "passed": True,
    "fingerprint": "fp1",
    "kernels": [
        {"name": "norm fp32 64", "row_counts": [1, 2, 7], "failure": None},
        {"name": "linear bf16 64 x 64", "row_counts": [1, 2, 7], "failure": None},
    ],
    "threads": [1, 2],
    "bf16_products": True,
}
FAILED = {
    "passed": False,
    "fingerprint": "fp2",
    "kernels": [{"name": "norm fp32 64", "row_counts": [1], "failure": "row 3 differs"}],
    "threads": [1, 2],
    "bf16_products": True,
}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One Chromium for the whole file."""
    with chromium(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


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


@pytest.fixture
def page(browser: Browser, served: Served) -> Iterator[Page]:
    """The console of the file's server."""
    with opened(browser, f"{served.url}/") as page:
        page.wait_for_text("#summary", "1 of 1 replicas up")
        yield page


def _ask(page: Page, question: str = "Hi") -> None:
    page.evaluate("document.querySelector('#question').focus()")
    page.type(question)
    page.press("Enter")


def _wait_for_answers(page: Page, number: int = 1) -> None:
    """Wait until so many answers have ended."""
    page.wait_for(
        f"document.querySelectorAll('.answer').length === {number} && "
        "document.querySelector('#turns').getAttribute('aria-busy') === 'false'"
    )


def _ask_and_hold(page: Page, served: Served) -> None:
    """Have an answer begin and stand still, as long as the engine is stalled."""
    served.engine.step_s = STREAM_S
    _ask(page)
    page.wait_for("document.querySelector('.answer .text').textContent.length > 3")
    served.engine.is_stalled = True


def _answers(page: Page) -> list[str]:
    found = page.evaluate(
        "[...document.querySelectorAll('.answer > .text')].map((each) => each.textContent)"
    )
    return list(found)


def _prompt(request: Request) -> str:
    return bytes(token for token in request.prompt if token < 256).decode()


def test_a_chat_of_two_turns_with_all_settings(page: Page, served: Served) -> None:
    served.engine.next_token = spelling("Salut, été! ✓", ends=True)
    page.fill("[name=system]", "Be brief.")
    page.fill("[name=temperature]", "0.25")
    page.fill("[name=most]", "40")
    page.fill("[name=seed]", "9007199254740991")
    _ask(page, "Hi")
    _wait_for_answers(page)
    _ask(page, "And you?")
    _wait_for_answers(page, 2)
    assert _answers(page) == ["Salut, été! ✓"] * 2
    first, second = served.engine.requests
    params = second.params
    assert (params.temperature, params.max_tokens, params.seed) == (0.25, 40, 9007199254740991)
    for part in ("Be brief.", "Hi"):
        assert part in _prompt(first) and part in _prompt(second)
    assert "Salut, été! ✓" in _prompt(second) and "And you?" in _prompt(second)
    facts = page.text(".answer .facts")
    assert facts.startswith("18 tokens · ") and "seed 9007199254740991 · fingerprint fp1" in facts
    page.click("#clear")
    _ask(page, "Anew")
    _wait_for_answers(page)
    assert "Salut" not in _prompt(served.engine.requests[-1])


def test_a_seed_is_drawn_for_each_question_and_shown(page: Page, served: Served) -> None:
    served.engine.next_token = spelling("word", ends=True)
    for number in (1, 2):
        _ask(page)
        _wait_for_answers(page, number)
    first, second = (request.params.seed for request in served.engine.requests)
    assert first != second
    assert f"seed {first} " in page.text(".answer .facts")


def test_a_wrong_setting_is_pointed_at_and_not_sent(page: Page, served: Served) -> None:
    page.click("#settings summary")
    page.evaluate("document.querySelector('[name=temperature]').value = '3'")
    _ask(page)
    page.wait_for("document.activeElement.name === 'temperature'")
    assert page.is_shown("[name=temperature]")
    assert page.evaluate("document.querySelector('#question').value") == "Hi"
    assert served.engine.requests == []


@pytest.mark.parametrize("way", ["button", "escape", "leave"])
def test_stopping_frees_what_the_answer_held(page: Page, served: Served, way: str) -> None:
    _ask_and_hold(page, served)
    assert served.http.get("/stats").json()["replicas"][0]["running"] == 1
    page.wait_for_text("[data-is=batchText]", "1 of 64")
    if way == "leave":
        page.goto("about:blank")
    elif way == "button":
        page.click("#stop")
    else:
        page.press("Escape")
    served.wait_until(lambda: served.engine.num_running == 0, 2.0)
    assert served.http.get("/stats").json()["replicas"][0]["running"] == 0
    if way == "leave":
        return
    _wait_for_answers(page)
    assert page.text(".answer .problem") == "Stopped."
    assert page.is_shown("#send") and not page.is_shown("#stop")
    assert len(served.engine.aborted) == 1
    [partly] = _answers(page)
    served.engine.is_stalled = False
    page.fill("[name=most]", "4")
    _ask(page, "Go on")
    _wait_for_answers(page, 2)
    assert partly in _prompt(served.engine.requests[-1])


def test_text_stays_text(page: Page, served: Served) -> None:
    nasty = '<img src=x onerror="window.hit=1"><script>window.hit=1</script>&amp;\n\n  <b>b</b>'
    served.engine.next_token = spelling(nasty, ends=True)
    _ask(page, nasty)
    _wait_for_answers(page)
    assert _answers(page) == [nasty]
    assert page.text(".question .text") == nasty
    assert page.evaluate("document.querySelectorAll('#turns :is(img, script, b)').length") == 0
    assert page.evaluate("window.hit") is None


def test_a_refusal_is_the_servers_sentence_and_the_question_comes_back(
    page: Page, served: Served
) -> None:
    _ask(page, "x" * 600)
    _wait_for_answers(page)
    assert "the longest prompt that leaves room for an answer has 511" in page.text(
        ".answer .problem"
    )
    assert page.evaluate("document.querySelector('#question').value") == "x" * 600
    served.engine.refusal = Overloaded("The queues of all engines are full.")
    page.fill("#question", "short")
    page.press("Enter")
    page.wait_for_text(".answer .problem", "The queues of all engines are full.")
    served.engine.refusal = None
    page.press("Enter")
    _wait_for_answers(page, 3)
    assert "xxx" not in _prompt(served.engine.requests[-1])


def test_a_stream_that_fails_keeps_what_came_and_says_why(page: Page, served: Served) -> None:
    _ask_and_hold(page, served)
    served.engine.failure = "The step failed: scripted."
    served.engine.is_stalled = False
    _wait_for_answers(page)
    assert page.text(".answer .problem") == "The step failed: scripted."
    assert len(_answers(page)[0]) > 3


def test_a_stream_that_is_cut_off_is_no_answer(page: Page) -> None:
    event = 'data: {"choices": [{"delta": {"content": "Hal"}, "token_ids": [1]}]}\\n\\n'
    found = page.evaluate(
        f"""(async () => {{
          const {{ readAnswer, emptyAnswer }} = await import("./console/answer.js");
          window.fetch = async () => new Response("{event.replace('"', chr(92) + '"')}");
          const answer = emptyAnswer();
          const problem = await readAnswer({{}}, answer, new AbortController().signal, () => {{}})
            .then(() => "none", (error) => error.message);
          return [answer.text, problem];
        }})()"""
    )
    assert found == ["Hal", "The connection broke before the answer's end."]


def test_the_same_question_again_has_the_same_bits_or_says_where_not(
    page: Page, served: Served
) -> None:
    page.fill("[name=most]", "30")
    _ask(page)
    _wait_for_answers(page)
    page.click(".answer [data-is=repeat]")
    page.wait_for_text("[data-is=verdict]", "bit for bit")
    assert "the same 30 tokens with the same log-probabilities" in page.text("[data-is=verdict]")
    first, second = served.engine.requests
    assert (first.prompt, first.params) == (second.prompt, second.params)

    def other(request: Request, choice: int, position: int) -> int:
        return by_hash(request, choice, position) if position < 7 else 65

    served.engine.next_token = other
    page.click(".answer [data-is=repeat]")
    page.wait_for_text("[data-is=verdict]", "although the kernels have the same fingerprint")
    assert "it differs from token 8 on" in page.text("[data-is=verdict]")
    page.click("[data-is=other] summary")
    assert page.text("[data-is=otherText]").endswith("A" * 23)
    served.engine.fingerprint = "fp2"
    page.click(".answer [data-is=repeat]")
    page.wait_for_text("[data-is=verdict]", "not promised between the fingerprints fp1 and fp2")


def test_a_stopped_answer_is_compared_as_far_as_it_went(page: Page, served: Served) -> None:
    _ask_and_hold(page, served)
    page.press("Escape")
    _wait_for_answers(page)
    served.engine.is_stalled = False
    page.click(".answer [data-is=repeat]")
    page.wait_for_text("[data-is=verdict]", "bit for bit")
    assert len(_answers(page)[0]) == served.engine.requests[-1].params.max_tokens


def test_tokens_tell_how_likely_they_were(page: Page, served: Served) -> None:
    _ask(page)
    _wait_for_answers(page)
    title = page.evaluate("document.querySelector('.answer .text span').title")
    assert title.startswith("77.9 %, log-probability -0.2500, token ")
    clear = "rgba(0, 0, 0, 0)"
    colour = "getComputedStyle(document.querySelector('.answer .text span')).backgroundColor"
    assert page.evaluate(colour) == clear
    page.click("[name=tints]")
    assert page.evaluate(colour) != clear


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
        page.wait_for("document.querySelector('#key-dialog').open")
        assert page.text("#key-reason").startswith("No API key was given.")
        page.type("guess")
        page.press("Enter")
        page.wait_for_text("#key-reason", "The API key is not one of this server's.")
        page.press("Escape")
        page.wait_for_text("#stats-problem", "The API key is not one of this server's.")
        _ask(page)
        page.wait_for("document.querySelector('#key-dialog').open")
        page.type("secret")
        page.press("Enter")
        _wait_for_answers(page)
        assert len(_answers(page)[0]) > 3
        page.wait_for_text("#summary", "1 of 1 replicas up")
        assert not page.evaluate("document.querySelector('#key-dialog').open")
        assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
        assert "secret" not in page.evaluate("document.documentElement.outerHTML")
        page.goto(f"{served.url}/models/a/")
        page.wait_for_text("#summary", "1 of 1 replicas up")


def test_who_puts_the_question_for_a_key_aside_is_left_alone(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONSOLE_KEYS", "secret")
    settings = ServeSettings(auth=AuthSettings(keys_variable="CONSOLE_KEYS"))
    with serve(settings) as served, opened(browser, f"{served.url}/") as page:
        page.wait_for("document.querySelector('#key-dialog').open")
        page.click("#key-cancel")
        page.wait_for_text("#stats-problem", "No API key was given.")
        before = _num_polls(page)
        page.wait_for(_polls_exceed(page, before))
        assert not page.evaluate("document.querySelector('#key-dialog').open")
        page.click("#change-key")
        page.type("secret")
        page.press("Enter")
        page.wait_for_text("#summary", "1 of 1 replicas up")
        assert page.text("#stats-problem") == ""


class _Pair(FakeEngine):
    """Two replicas of different kinds, of which some may be dead."""

    def __init__(self) -> None:
        super().__init__(limits=LIMITS)
        self.alive = [True, True]

    async def stats(self) -> Sequence[ReplicaStats]:
        if not any(self.alive):
            raise EngineUnavailable("No engine answers.")
        [own] = await super().stats()
        idle = replace(own.stats, running=0, kv_blocks_free=100, generated_tokens=0, preempted=1234)
        both = [
            replace(own, certificate=CERTIFICATE),
            replace(own, replica="1", stats=idle, certificate=FAILED),
        ]
        return [each for each, lives in zip(both, self.alive, strict=True) if lives]

    async def health(self) -> Sequence[ReplicaHealth]:
        return [
            ReplicaHealth(
                replica=str(place), progresses=lives, detail="" if lives else "The engine is down."
            )
            for place, lives in enumerate(self.alive)
        ]


def _card(place: int, part: str) -> str:
    return f".replica:nth-of-type({place + 1}) [data-is={part}]"


def test_replicas_are_shown_as_they_are(browser: Browser) -> None:
    engine = _Pair()
    with serve(engine=engine) as served, opened(browser, f"{served.url}/") as page:
        page.wait_for_text("#summary", "2 of 2 replicas up · 0 running")
        assert page.text("#model") == "tiny" and page.evaluate("document.title") == "tiny · Shoal"
        assert page.text(_card(1, "kvText")) == "156 of 256"
        assert page.text(_card(1, "preempted")) == "1,234"
        assert page.is_shown("#kinds")
        assert page.text(_card(0, "passed")) == "Certified"
        assert page.text(_card(0, "fingerprint")) == "fp1"
        page.click(f"{_card(0, 'certificate')} summary")
        assert "batches of 1, 2 and 7" in page.text(_card(0, "tried"))
        assert "on 1 and 2 threads" in page.text(_card(0, "tried"))
        assert page.text(_card(1, "passed")) == "Not certified"
        assert page.text(_card(1, "kernels")) == "norm fp32 64: row 3 differs"

        engine.step_s = STREAM_S
        page.fill("[name=most]", "90000")
        _ask(page)
        page.wait_for_text(_card(0, "batchText"), "1 of 64")
        page.wait_for(f"parseFloat({_text_of(_card(0, 'speed'))}) > 5")
        assert page.evaluate(f"document.querySelector('{_card(0, 'batch')}').value") == 1
        assert page.text(_card(1, "speed")) == "0.0 tokens/s"
        page.press("Escape")
        page.wait_for_text(_card(0, "cancelled"), "1")
        assert page.evaluate(f"document.querySelector('{_card(0, 'certificate')}').open")


def _text_of(selector: str) -> str:
    return f"document.querySelector('{selector}').textContent"


def test_the_dead_are_shown_as_dead_and_come_back(browser: Browser) -> None:
    engine = _Pair()
    with serve(engine=engine) as served, opened(browser, f"{served.url}/") as page:
        page.wait_for_text("#summary", "2 of 2 replicas up")
        engine.alive = [True, False]
        page.wait_for_text("#summary", "1 of 2 replicas up")
        assert page.text(_card(1, "state")) == "down"
        assert page.text(_card(1, "detail")) == "The engine is down."
        assert page.text(_card(0, "state")) == "up"
        engine.alive = [False, False]
        page.wait_for_text("#stats-problem", "No engine answers.")
        assert page.text(_card(0, "state")) == "down"
        engine.alive = [True, True]
        page.wait_for_text("#summary", "2 of 2 replicas up")
        assert page.text(_card(1, "state")) == "up" and page.text("#stats-problem") == ""


def _num_polls(page: Page) -> int:
    return len(
        [
            event
            for event in page.events("Network.requestWillBeSent")
            if event["request"]["url"].endswith("/stats")
        ]
    )


def _polls_exceed(page: Page, number: int) -> str:
    """Have the page count its own polls, beyond ``number``."""
    return (
        f"performance.getEntriesByType('resource').filter((each) => "
        f"each.name.endsWith('/stats')).length > {number}"
    )


def _hide(page: Page, is_hidden: bool) -> None:
    value = "true" if is_hidden else "false"
    page.evaluate(
        f"""Object.defineProperty(document, "hidden", {{ value: {value}, configurable: true }});
        document.dispatchEvent(new Event("visibilitychange"))"""
    )


def test_nobody_is_asked_for_a_page_that_nobody_sees(page: Page) -> None:
    _hide(page, True)
    page.evaluate("new Promise((done) => setTimeout(done, 300))")  # one may be under way
    before = _num_polls(page)
    page.evaluate("new Promise((done) => setTimeout(done, 2500))")
    assert _num_polls(page) == before
    _hide(page, False)
    page.wait_for(_polls_exceed(page, before), within_s=10)


def test_a_server_that_fails_is_asked_less_often(browser: Browser) -> None:
    engine = _Pair()
    with serve(engine=engine) as served, opened(browser, f"{served.url}/") as page:
        page.wait_for_text("#summary", "2 of 2 replicas up")
        engine.alive = [False, False]
        page.wait_for_text("#stats-problem", "No engine answers.")
        before = _num_polls(page)
        page.evaluate("new Promise((done) => setTimeout(done, 5500))")
        # After 2 s and 4 s more, rather than every second.
        assert _num_polls(page) - before <= 2
        page.call(
            "Network.emulateNetworkConditions",
            offline=True,
            latency=0,
            downloadThroughput=-1,
            uploadThroughput=-1,
        )
        _ask(page)
        _wait_for_answers(page)
        assert page.text(".answer .problem") == "The server cannot be reached."


def test_events_are_read_however_they_are_cut(page: Page) -> None:
    stream = "data: é✓\r\n\r\n: waiting\n\ndata:a\ndata: b\n\nid: 3\ndata: [DONE]\n\ndata: cut"
    encoded = base64.b64encode(stream.encode()).decode()
    found = page.evaluate(
        f"""(async () => {{
          const {{ events }} = await import("./console/events.js");
          const bytes = Uint8Array.from(atob("{encoded}"), (letter) => letter.charCodeAt(0));
          const read = [];
          for (const size of [1, 2, 3, 1000]) {{
            const body = new ReadableStream({{
              start(controller) {{
                for (let place = 0; place < bytes.length; place += size) {{
                  controller.enqueue(bytes.slice(place, place + size));
                }}
                controller.close();
              }},
            }});
            const data = [];
            for await (const each of events(body)) {{
              data.push(each);
            }}
            read.push(data);
          }}
          return read;
        }})()"""
    )
    assert found == [["é✓", "a\nb", "[DONE]"]] * 4


def test_rates_are_of_the_last_seconds_and_begin_anew_with_the_engine(page: Page) -> None:
    found = page.evaluate(
        """(async () => {
          const { Rate } = await import("./console/rate.js");
          const rate = new Rate();
          const samples = [[0, 0], [10, 1000], [30, 2000], [30, 9000], [5, 10000], [7, 11000]];
          return samples.map(([value, now]) => rate.note(value, now));
        })()"""
    )
    assert found == [None, 10, 15, 0, None, 2]


def test_everything_can_be_done_by_keyboard_and_has_a_name(page: Page, served: Served) -> None:
    served.engine.next_token = spelling("word", ends=True)
    _ask(page)
    _wait_for_answers(page)
    controls = page.controls()
    assert len(controls) > 10
    assert [role for role, name in controls if not name.strip()] == []
    reached = set()
    for _ in range(30):
        page.press("Tab")
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
    page.show(width, 700)
    _ask(page, "y" * 120)
    _wait_for_answers(page)
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
def test_text_can_be_told_from_its_ground(page: Page, served: Served, scheme: str) -> None:
    page.show(1280, 900, scheme)
    page.click("[name=tints]")
    _ask(page)
    _wait_for_answers(page)
    page.click(".answer [data-is=repeat]")
    page.wait_for_text("[data-is=verdict]", "bit for bit")
    page.evaluate(
        "document.querySelectorAll('.answer .text span')"
        ".forEach((each, place) => { each.dataset.level = place % 5; })"
    )
    assert page.evaluate(_CONTRASTS) == {}
