"""What the console shows of the replicas, in a real browser before scripted engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from playwright.sync_api import Browser, Page

from shoal.inference import Limits
from shoal.inference.journal import JournalStats
from shoal_deployments.engine_client import EngineUnavailable, ReplicaHealth, ReplicaStats
from tests.deployments.browser import opened
from tests.deployments.console_page import (
    NUM_POLLS,
    STREAM_S,
    ask,
    text,
    wait_for,
    wait_for_answers,
    wait_for_text,
)
from tests.deployments.fake_engine import FakeEngine
from tests.deployments.server import serve

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


class _Pair(FakeEngine):
    """Two replicas of different kinds, of which some may be dead."""

    def __init__(self) -> None:
        super().__init__(limits=LIMITS)
        self.alive = [True, True]
        self.wrong = ""
        """With those that are alive."""

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
                replica=str(place),
                progresses=lives,
                detail=self.wrong if lives else "The engine is down.",
            )
            for place, lives in enumerate(self.alive)
        ]


def _card(place: int, part: str) -> str:
    return f".replica:nth-of-type({place + 1}) [data-is={part}]"


def test_replicas_are_shown_as_they_are(browser: Browser) -> None:
    engine = _Pair()
    with serve(engine=engine) as served, opened(browser, f"{served.url}/") as page:
        wait_for_text(page, "#summary", "2 of 2 replicas up · 0 running")
        assert text(page, "#model") == "tiny" and page.evaluate("document.title") == "tiny · Shoal"
        assert text(page, _card(1, "kvText")) == "156 of 256"
        assert text(page, _card(1, "preempted")) == "1,234"
        assert page.is_visible("#kinds")
        assert text(page, _card(0, "passed")) == "Certified"
        assert text(page, _card(0, "fingerprint")) == "fp1"
        page.click(f"{_card(0, 'certificate')} summary")
        assert "batches of 1, 2 and 7" in text(page, _card(0, "tried"))
        assert "on 1 and 2 threads" in text(page, _card(0, "tried"))
        assert text(page, _card(1, "passed")) == "Not certified"
        assert text(page, _card(1, "kernels")) == "norm fp32 64: row 3 differs"

        engine.step_s = STREAM_S
        page.fill("[name=most]", "90000")
        ask(page)
        wait_for_text(page, _card(0, "batchText"), "1 of 64")
        wait_for(page, f"parseFloat({_text_of(_card(0, 'speed'))}) > 5")
        assert page.evaluate(f"document.querySelector('{_card(0, 'batch')}').value") == 1
        assert text(page, _card(1, "speed")) == "0.0 tokens/s"
        page.keyboard.press("Escape")
        wait_for_text(page, _card(0, "cancelled"), "1")
        assert page.evaluate(f"document.querySelector('{_card(0, 'certificate')}').open")


def _text_of(selector: str) -> str:
    return f"document.querySelector('{selector}').textContent"


def test_a_journal_shows_what_it_has_and_that_its_disk_fails(browser: Browser) -> None:
    engine = FakeEngine()
    with serve(engine=engine) as served, opened(browser, f"{served.url}/") as page:
        wait_for_text(page, "#summary", "1 of 1 replicas up")
        assert not page.is_visible(_card(0, "journal"))
        engine.journal = JournalStats(
            written=12345, pending=67, oldest_s=8.25, dropped=9, refused=10, errors=11, failing=1
        )
        wait_for_text(page, _card(0, "journalWritten"), "12,345")
        for name, value in {
            "Pending": "67",
            "Oldest": "8.3 s",
            "Dropped": "9",
            "Refused": "10",
            "Errors": "11",
            "Problem": "Its disk fails, and is tried again every second.",
        }.items():
            assert text(page, _card(0, f"journal{name}")) == value
        engine.journal = replace(engine.journal, failing=0)
        wait_for(page, f"{_text_of(_card(0, 'journalProblem'))} === ''")


def test_the_dead_are_shown_as_dead_and_come_back(browser: Browser) -> None:
    engine = _Pair()
    with serve(engine=engine) as served, opened(browser, f"{served.url}/") as page:
        wait_for_text(page, "#summary", "2 of 2 replicas up")
        engine.alive = [True, False]
        wait_for_text(page, "#summary", "1 of 2 replicas up")
        assert text(page, _card(1, "state")) == "down"
        assert text(page, _card(1, "detail")) == "The engine is down."
        assert text(page, _card(0, "state")) == "up"
        engine.alive = [False, False]
        wait_for_text(page, "#stats-problem", "No engine answers.")
        assert text(page, _card(0, "state")) == "down"
        engine.alive = [True, True]
        wait_for_text(page, "#summary", "2 of 2 replicas up")
        assert text(page, _card(1, "state")) == "up" and text(page, "#stats-problem") == ""
        engine.wrong = "The engine has other weights."
        wait_for_text(page, _card(1, "detail"), engine.wrong)
        assert text(page, _card(1, "state")) == "up"


def _hide(page: Page, is_hidden: bool) -> None:
    value = "true" if is_hidden else "false"
    page.evaluate(
        f"""Object.defineProperty(document, "hidden", {{ value: {value}, configurable: true }});
        document.dispatchEvent(new Event("visibilitychange"))"""
    )


def test_nobody_is_asked_for_a_page_that_nobody_sees(page: Page) -> None:
    _hide(page, True)
    page.wait_for_timeout(300)  # one may be under way
    before = page.evaluate(NUM_POLLS)
    page.wait_for_timeout(2500)
    assert page.evaluate(NUM_POLLS) == before
    _hide(page, False)
    wait_for(page, f"{NUM_POLLS} > {before}", within_s=10)


def test_a_server_that_fails_is_asked_less_often(browser: Browser) -> None:
    engine = _Pair()
    with serve(engine=engine) as served, opened(browser, f"{served.url}/") as page:
        wait_for_text(page, "#summary", "2 of 2 replicas up")
        engine.alive = [False, False]
        wait_for_text(page, "#stats-problem", "No engine answers.")
        before = page.evaluate(NUM_POLLS)
        page.wait_for_timeout(5500)
        # After 2 s and 4 s more, rather than every second.
        assert page.evaluate(NUM_POLLS) - before <= 2
        page.context.set_offline(True)
        ask(page)
        wait_for_answers(page)
        assert text(page, ".answer .problem") == "The server cannot be reached."


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
