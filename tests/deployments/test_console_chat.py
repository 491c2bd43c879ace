"""The console's chat, in a real browser before a scripted engine."""

from __future__ import annotations

import base64

import pytest
from playwright.sync_api import Page

from shoal.errors import Overloaded
from shoal.inference import Request
from tests.deployments.console_page import (
    answers,
    ask,
    ask_and_hold,
    prompt_of,
    text,
    wait_for,
    wait_for_answers,
    wait_for_text,
)
from tests.deployments.fake_engine import by_hash, spelling
from tests.deployments.server import Served

LARGEST_SEED = 2**63 - 1
"""Beyond what a number of JavaScript's holds exactly."""


def test_a_chat_of_two_turns_with_all_settings(page: Page, served: Served) -> None:
    served.engine.next_token = spelling("Salut, été! ✓", ends=True)
    page.fill("[name=system]", "Be brief.")
    page.fill("[name=temperature]", "0.25")
    page.fill("[name=most]", "40")
    page.fill("[name=seed]", str(LARGEST_SEED))
    ask(page, "Hi")
    wait_for_answers(page)
    ask(page, "And you?")
    wait_for_answers(page, 2)
    assert answers(page) == ["Salut, été! ✓"] * 2
    first, second = served.engine.requests
    params = second.params
    assert (params.temperature, params.max_tokens, params.seed) == (0.25, 40, LARGEST_SEED)
    for part in ("Be brief.", "Hi"):
        assert part in prompt_of(first) and part in prompt_of(second)
    assert "Salut, été! ✓" in prompt_of(second) and "And you?" in prompt_of(second)
    facts = text(page, ".answer .facts")
    assert facts.startswith("18 tokens · ")
    assert f"seed {LARGEST_SEED} · fingerprint fp1" in facts
    page.click("#clear")
    ask(page, "Anew")
    wait_for_answers(page)
    assert "Salut" not in prompt_of(served.engine.requests[-1])


def test_a_seed_is_drawn_for_each_question_and_shown(page: Page, served: Served) -> None:
    served.engine.next_token = spelling("word", ends=True)
    page.fill("[name=temperature]", "0.7")
    for number in (1, 2):
        ask(page)
        wait_for_answers(page, number)
    first, second = (request.params.seed for request in served.engine.requests)
    assert first != second
    assert f"seed {first} " in text(page, ".answer .facts")


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", "3"), ("seed", str(LARGEST_SEED + 1)), ("seed", "-1"), ("seed", "1.5")],
)
def test_a_wrong_setting_is_pointed_at_and_not_sent(
    page: Page, served: Served, name: str, value: str
) -> None:
    page.fill(f"[name={name}]", value)
    page.click("#settings summary")
    ask(page)
    wait_for(page, f"document.activeElement.name === '{name}'")
    assert page.is_visible(f"[name={name}]")
    assert page.evaluate("document.querySelector('#question').value") == "Hi"
    assert served.engine.requests == []


@pytest.mark.parametrize("way", ["button", "escape", "leave"])
def test_stopping_frees_what_the_answer_held(page: Page, served: Served, way: str) -> None:
    ask_and_hold(page, served)
    assert served.http.get("/stats").json()["replicas"][0]["running"] == 1
    wait_for_text(page, "[data-is=batchText]", "1 of 64")
    if way == "leave":
        page.goto("about:blank")
    elif way == "button":
        page.click("#stop")
    else:
        page.keyboard.press("Escape")
    served.wait_until(lambda: served.engine.num_running == 0, 2.0)
    assert served.http.get("/stats").json()["replicas"][0]["running"] == 0
    if way == "leave":
        return
    wait_for_answers(page)
    assert text(page, ".answer .problem") == "Stopped."
    assert page.is_visible("#send") and not page.is_visible("#stop")
    assert len(served.engine.aborted) == 1
    [partly] = answers(page)
    served.engine.is_stalled = False
    page.fill("[name=most]", "4")
    ask(page, "Go on")
    wait_for_answers(page, 2)
    assert partly in prompt_of(served.engine.requests[-1])


def test_text_stays_text(page: Page, served: Served) -> None:
    nasty = '<img src=x onerror="window.hit=1"><script>window.hit=1</script>&amp;\n\n  <b>b</b>'
    served.engine.next_token = spelling(nasty, ends=True)
    page.fill("[name=most]", "100")
    ask(page, nasty)
    wait_for_answers(page)
    assert answers(page) == [nasty]
    assert text(page, ".question .text") == nasty
    assert page.evaluate("document.querySelectorAll('#turns :is(img, script, b)').length") == 0
    assert page.evaluate("window.hit") is None


def test_a_refusal_is_the_servers_sentence_and_the_question_comes_back(
    page: Page, served: Served
) -> None:
    ask(page, "x" * 600)
    wait_for_answers(page)
    assert "the longest prompt that leaves room for an answer has 511" in text(
        page, ".answer .problem"
    )
    assert page.evaluate("document.querySelector('#question').value") == "x" * 600
    served.engine.refusal = Overloaded("The queues of all engines are full.")
    page.fill("#question", "short")
    page.keyboard.press("Enter")
    wait_for_text(page, ".answer .problem", "The queues of all engines are full.")
    served.engine.refusal = None
    page.keyboard.press("Enter")
    wait_for_answers(page, 3)
    assert "xxx" not in prompt_of(served.engine.requests[-1])


def test_a_stream_that_fails_keeps_what_came_and_says_why(page: Page, served: Served) -> None:
    ask_and_hold(page, served)
    served.engine.failure = "The step failed: scripted."
    served.engine.is_stalled = False
    wait_for_answers(page)
    assert text(page, ".answer .problem") == "The step failed: scripted."
    assert len(answers(page)[0]) > 3


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
    page.fill("[name=temperature]", "1")
    page.fill("[name=most]", "30")
    ask(page)
    wait_for_answers(page)
    page.click(".answer [data-is=repeat]")
    wait_for_text(page, "[data-is=verdict]", "bit for bit")
    assert "the same 30 tokens with the same log-probabilities" in text(page, "[data-is=verdict]")
    first, second = served.engine.requests
    assert (first.prompt, first.params) == (second.prompt, second.params)

    def other(request: Request, choice: int, position: int) -> int:
        return by_hash(request, choice, position) if position < 7 else 65

    served.engine.next_token = other
    page.click(".answer [data-is=repeat]")
    wait_for_text(page, "[data-is=verdict]", "although the kernels have the same fingerprint")
    assert "it differs from token 8 on" in text(page, "[data-is=verdict]")
    page.click("[data-is=other] summary")
    assert text(page, "[data-is=otherText]").endswith("A" * 23)
    served.engine.fingerprint = "fp2"
    page.click(".answer [data-is=repeat]")
    wait_for_text(page, "[data-is=verdict]", "not promised between the fingerprints fp1 and fp2")


def test_a_stopped_answer_is_compared_as_far_as_it_went(page: Page, served: Served) -> None:
    ask_and_hold(page, served)
    page.keyboard.press("Escape")
    wait_for_answers(page)
    served.engine.is_stalled = False
    page.click(".answer [data-is=repeat]")
    wait_for_text(page, "[data-is=verdict]", "bit for bit")
    assert len(answers(page)[0]) == served.engine.requests[-1].params.max_tokens


def test_tokens_tell_how_likely_they_were(page: Page, served: Served) -> None:
    ask(page)
    wait_for_answers(page)
    title = page.evaluate("document.querySelector('.answer .text span').title")
    assert title.startswith("77.9 %, log-probability -0.2500, token ")
    clear = "rgba(0, 0, 0, 0)"
    colour = "getComputedStyle(document.querySelector('.answer .text span')).backgroundColor"
    assert page.evaluate(colour) == clear
    page.click("[name=tints]")
    assert page.evaluate(colour) != clear


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
