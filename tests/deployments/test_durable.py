"""``durable``: answers that say whether their tokens are in the journal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from shoal.config import JournalSettings, ServeSettings
from shoal.inference.journal import JournalStats
from shoal_deployments.engine_client import EngineUnavailable
from tests.deployments.server import Served, events, serve

MESSAGES: Any = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def module_server() -> Iterator[Served]:
    """A server that keeps a journal."""
    with serve(ServeSettings(journal=JournalSettings(dir="unused"))) as served:
        yield served


@pytest.mark.parametrize("path", ["chat", "completions"])
@pytest.mark.parametrize("problem", [None, "The journal's queue was full."])
def test_each_choice_says_with_its_end_whether_it_is_kept(
    served: Served, path: str, problem: str | None
) -> None:
    post = served.chat if path == "chat" else served.complete
    served.engine.durable_problem = problem
    wanted = (
        {"durable": True} if problem is None else {"durable": False, "durable_problem": problem}
    )
    whole = post(durable=True, n=2).json()
    assert [request.durable for request in served.engine.requests] == [True]
    for choice in whole["choices"]:
        assert {name: choice[name] for name in wanted} == wanted
    streamed = events(post(durable=True, n=2, stream=True))[:-1]
    choices = [choice for event in streamed for choice in event["choices"]]
    ends = [choice for choice in choices if choice["finish_reason"]]
    assert len(ends) == 2
    for choice in ends:
        assert {name: choice[name] for name in wanted} == wanted
    assert all("durable" not in choice for choice in choices if not choice["finish_reason"])


@pytest.mark.parametrize("durable", [None, False])
def test_who_does_not_ask_is_not_told(served: Served, durable: bool | None) -> None:
    assert "durable" not in served.complete(durable=durable).json()["choices"][0]
    assert served.engine.requests[0].durable is False


def test_the_official_client_asks_and_is_told(served: Served) -> None:
    answer = served.sdk().chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=3, extra_body={"durable": True}
    )
    assert (answer.choices[0].model_extra or {})["durable"] is True
    with pytest.raises(openai.BadRequestError) as refused:
        served.sdk().completions.create(model="tiny", prompt="x", extra_body={"durable": 1})
    assert refused.value.param == "durable"


@pytest.mark.parametrize(
    ("journal", "message"),
    [
        (JournalSettings(), "this server keeps no journal"),
        (JournalSettings(dir="unused", fsync="never"), "never forced onto the disk"),
    ],
)
def test_what_cannot_be_promised_is_refused(journal: JournalSettings, message: str) -> None:
    with serve(ServeSettings(journal=journal)) as served:
        refused = served.complete(durable=True, stream=True)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "durable"
        assert message in refused.json()["error"]["message"]
        assert served.complete(durable=False).status_code == 200


def test_a_full_journal_is_a_503_with_its_reason(served: Served) -> None:
    served.engine.refusal = EngineUnavailable("The journal waits for its disk with 12 tokens.")
    refused = served.complete()
    assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
    assert "waits for its disk" in refused.json()["error"]["message"]
    served.engine.refusal = None


def test_its_numbers_are_among_the_replicas(served: Served) -> None:
    [replica] = served.http.get("/stats").json()["replicas"]
    assert not any(name.startswith("journal_") for name in replica)
    assert "journal" not in served.http.get("/metrics").text
    served.engine.journal = JournalStats(
        written=5, pending=4, oldest_s=1.5, dropped=3, refused=2, errors=1, failing=1
    )
    [replica] = served.http.get("/stats").json()["replicas"]
    assert replica["journal_written"] == 5 and replica["journal_oldest_s"] == 1.5
    lines = served.http.get("/metrics").text.splitlines()
    assert 'shoal_engine_journal_dropped_total{replica="0"} 3.0' in lines
    assert 'shoal_engine_journal_oldest_s{replica="0"} 1.5' in lines
    assert 'shoal_engine_journal_errors_total{replica="0"} 1.0' in lines
