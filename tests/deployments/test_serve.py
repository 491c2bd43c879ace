"""``shoal serve`` from end to end: two engines, two frontends, real clients, one Ray."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from shoal.inference.journal import read_answers
from tests.deployments.running import (
    NAME,
    Running,
    engine_pids,
    frontend_pids,
    shoal_serve,
    wait_until,
)
from tests.deployments.server import events_with_ids
from tests.deployments.storm import storm

NUM_CLIENTS = 100
NUM_BURST = 200


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Two engines and two frontends, with queues of few places and journals.

    As from a file that describes a run too.
    """
    folder = tmp_path_factory.mktemp("serve")
    overrides = (
        "serve.replicas=2",
        "serve.batch.sequences=4",
        "serve.limits.queue=8",
        "serve.kv.block_tokens=16",
        "serve.kv.tokens=8192",
        f"serve.journal.dir={folder / 'journal'}",
        "serve.journal.interval_s=8",
        "data.sources.0.path=unread",
        "train.steps=1",
    )
    with shoal_serve(folder, *overrides) as running:
        yield running
        last = [running.complete().json()["id"] for _ in range(3)]
    # The end of a server does not wait for the interval, and loses nothing of it.
    assert {f"{name}-0" for name in last} <= read_answers(folder / "journal").keys()


@pytest.fixture(autouse=True)
def nothing_is_left(running: Running) -> Iterator[None]:
    """After each test nothing runs and all blocks are free."""
    yield
    running.assert_idle(10.0)


def test_the_terminal_shows_only_what_shoal_says(running: Running) -> None:
    lines = running.process.output.splitlines()
    assert lines[0] == f"{NAME}: engines: 2, frontends: 2"
    assert lines[1].startswith("Note: model.path is served as it is; what the run of this file")
    assert lines[2].startswith("Logs are in /")
    assert lines[3].startswith("Waiting for the engines, which load the model")
    url = running.url
    assert lines[4] == f"Ready at {url}/v1, with a console at {url}/  (Ctrl-C ends it)"
    assert len(lines) == 5, lines


def test_the_official_client_chats_streams_and_gets_logprobs(running: Running) -> None:
    messages: Any = [{"role": "user", "content": "Hi"}]
    chat = running.sdk.chat.completions.create(
        model=NAME, messages=messages, max_tokens=6, temperature=0, logprobs=True, top_logprobs=2
    )
    choice = chat.choices[0]
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert len(choice.logprobs.content) == 6
    assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)
    stream = running.sdk.chat.completions.create(
        model=NAME, messages=messages, max_tokens=6, temperature=0, stream=True
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == choice.message.content
    assert chat.system_fingerprint == running.replicas()[0]["certificate"]["fingerprint"]
    assert running.sdk.models.list().data[0].id == NAME


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"seed": 3},
        {"seed": 5, "n": 3, "temperature": 0.7, "top_k": 40},
    ],
)
def test_the_bits_are_those_of_the_engine_itself(running: Running, fields: dict[str, Any]) -> None:
    prompt = "The same bits, whoever computes them."
    direct = running.direct(prompt.encode(), max_tokens=12, logprobs=1, **fields)
    body = {"prompt": prompt, "max_tokens": 12, "logprobs": 1, "return_token_ids": True} | fields
    cached = set()
    for _ in range(4):  # by either engine, with and without its prefix cache
        answer = running.complete(**body).json()
        cached.add(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        for choice, expected in zip(answer["choices"], direct, strict=True):
            assert choice["text"] == expected.text
            assert tuple(choice["token_ids"]) == expected.token_ids
            assert expected.logprobs is not None
            wanted = [entry.logprob for entry in expected.logprobs]
            assert choice["logprobs"]["token_logprobs"] == wanted
    finished = [replica["finished"] for replica in running.replicas()]
    assert sum(finished) >= 4
    assert max(cached) == (len(prompt) - 1) // 16 * 16


def test_what_is_said_to_be_durable_is_in_a_journal(running: Running) -> None:
    body = {"durable": True, "n": 2, "seed": 9, "max_tokens": 30, "return_token_ids": True}
    answer = running.complete(**body).json()
    assert [choice["durable"] for choice in answer["choices"]] == [True, True]
    answers = read_answers(running.model.parent / "journal")
    recorded = answers[f"{answer['id']}-0"]
    assert recorded.request.prompt == tuple(b"Hi") and recorded.request.seed == 9
    assert recorded.tokens == {choice["index"]: choice["token_ids"] for choice in answer["choices"]}
    assert recorded.finish_reasons.keys() == {0, 1}
    replicas = running.replicas()
    assert sum(replica["journal_written"] for replica in replicas) > 0
    assert not any(replica["journal_dropped"] for replica in replicas)


def test_a_stream_that_broke_goes_on_at_any_frontend_and_engine(running: Running) -> None:
    body = {"model": NAME, "prompt": "Go on", "max_tokens": 24, "n": 2, "stream": True}
    body |= {"return_token_ids": True, "stream_options": {"include_usage": True}}
    body["ignore_eos"] = True  # a seed is drawn, and may draw an end

    def ask(last_id: str | None) -> list[tuple[str | None, Any]]:
        headers = {} if last_id is None else {"Last-Event-ID": last_id}
        got = events_with_ids(running.http.post("/v1/completions", json=body, headers=headers).text)
        assert got.pop() == (None, "[DONE]")
        return got

    def tokens(got: list[tuple[str | None, Any]]) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {0: [], 1: []}
        for _, content in got:
            for choice in content["choices"]:
                found[choice["index"]] += choice["token_ids"]
        return found

    whole = ask(None)  # without a seed: it travels in the ids
    for cut in (1, len(whole) // 2, len(whole) - 2):
        for _ in range(3):
            rest = ask(whole[cut - 1][0])
            assert tokens(whole[:cut] + rest) == tokens(whole)
            assert rest[-1][1]["usage"]["completion_tokens"] == 48
            assert {content["id"] for _, content in rest} == {whole[0][1]["id"]}


def test_seeds_have_their_effect_on_both_routes(running: Running) -> None:
    def completion(seed: int | None) -> str:
        answer = running.complete(seed=seed, temperature=1, max_tokens=16)
        return str(answer.json()["choices"][0]["text"])

    def chat(seed: int | None) -> str | None:
        answer = running.sdk.chat.completions.create(
            model=NAME,
            messages=[{"role": "user", "content": "Hi"}],
            seed=seed,
            temperature=1,
            max_tokens=16,
        )
        return answer.choices[0].message.content

    for ask in (completion, chat):
        assert ask(1) == ask(1) != ask(2)
        assert ask(None) != ask(None)


def test_both_engines_serve_and_say_the_same(running: Running) -> None:
    prompts = [f"{number} bottles of beer on the wall" for number in range(24)]
    before = [replica["finished"] for replica in running.replicas()]

    def ask(prompt: str) -> str:
        answer = running.complete(prompt=prompt, max_tokens=8, temperature=0)
        return str(answer.json()["choices"][0]["text"])

    with ThreadPoolExecutor(6) as threads:
        together = list(threads.map(ask, prompts))
    alone = [ask(prompt) for prompt in prompts]
    assert together == alone
    after = [replica["finished"] for replica in running.replicas()]
    assert all(more > less for more, less in zip(after, before, strict=True))


def test_every_frontend_answers_some(running: Running) -> None:
    connections = [http.client.HTTPConnection(running.address, timeout=60) for _ in range(16)]

    def ask(connection: http.client.HTTPConnection) -> int:
        body = json.dumps({"model": NAME, "prompt": "Hi", "max_tokens": 1})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        with connection.getresponse() as answer:
            answer.read()
            return answer.status

    answered = re.compile(
        r'shoal_http_requests_total{frontend="(\w+)",path="/v1/completions",status="200"} (\d+)'
    )
    found: dict[str, int] = {}

    def have_both_answered() -> bool:
        with ThreadPoolExecutor(8) as threads:
            assert set(threads.map(ask, connections)) == {200}
        for _ in range(8):  # whichever frontend is asked
            for frontend, count in answered.findall(running.http.get("/metrics").text):
                found[frontend] = int(count)
        return len(found) == 2 and min(found.values()) >= 8

    wait_until(have_both_answered, 30)
    for connection in connections:
        connection.close()


@pytest.mark.parametrize("stay_s", [0.5, 0.02])
def test_clients_that_leave_free_what_they_held(running: Running, stay_s: float) -> None:
    storm(running, NUM_CLIENTS, stay_s)
    running.assert_idle(2.0)
    assert running.http.get("/health").json()["status"] == "ok"
    assert running.complaints() == []


def test_a_burst_is_answered_or_turned_away_at_once(running: Running) -> None:
    connections = [
        http.client.HTTPConnection(running.address, timeout=60) for _ in range(NUM_BURST)
    ]
    for connection in connections:
        connection.connect()
    all_ready = threading.Barrier(NUM_BURST)
    processes = engine_pids(running), frontend_pids(running)
    before = running.completions()

    def ask(number: int) -> tuple[int, str | None]:
        body = {"model": NAME, "prompt": f"number {number}", "max_tokens": 300, "seed": number}
        all_ready.wait()
        connections[number].request(
            "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        with connections[number].getresponse() as answer:
            answer.read()
            return answer.status, answer.getheader("retry-after")

    with ThreadPoolExecutor(NUM_BURST) as threads:
        answers = list(threads.map(ask, range(NUM_BURST)))
    for connection in connections:
        connection.close()
    statuses = {status for status, _ in answers}
    assert 200 in statuses and statuses & {429, 503} and statuses <= {200, 429, 503}
    assert {retry_after for status, retry_after in answers if status != 200} == {"1"}
    # By the frontends' clocks: these clients share a few cores, and look at their answers late.
    wait_until(lambda: (running.completions() - before).total() == NUM_BURST, 10)
    noted = running.completions() - before
    refused_s = max(took_s for status, took_s in noted if status != 200)
    assert refused_s < max(took_s for status, took_s in noted if status == 200)
    assert (engine_pids(running), frontend_pids(running)) == processes, "one was restarted"


def test_a_stream_outlives_its_engine(running: Running) -> None:
    expected = running.direct(b"Go on", max_tokens=4000, seed=11, ignore_eos=True)[0]
    engines = engine_pids(running)
    received: list[int] = []
    began = threading.Event()

    def read() -> None:
        stream = running.sdk.completions.create(
            model=NAME,
            prompt="Go on",
            max_tokens=4000,
            seed=11,
            stream=True,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        for chunk in stream:
            extra = chunk.choices[0].model_extra or {}
            received.extend(extra["token_ids"])
            if not began.is_set():
                _send(signal.SIGSTOP, engines)  # here and at once: all of it takes them a second
                began.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert began.wait(30)
    busy = _busiest(engines)
    os.kill(busy, signal.SIGKILL)
    _send(signal.SIGCONT, [pid for pid in engines if pid != busy])
    # Another is started in its place, which may be there before the stream is over.
    lost = _await_lost(running)
    reader.join(60)
    assert tuple(received) == expected.token_ids
    wait_until(lambda: _status(running) == "ok", 120)
    wait_until(lambda: "All engines and frontends are there again" in running.process.output, 30)
    assert "An engine or a frontend is lost" in running.process.output
    for _ in range(4):  # whichever frontend is asked
        wait_until(lambda: _migrated(running) == {str(lost): 1, str(1 - lost): 0}, 10)


def _send(number: signal.Signals, pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, number)


def _busiest(pids: list[int]) -> int:
    """Of processes that are stopped, the one that computes when they go on for a moment."""
    before = {pid: _processor_time(pid) for pid in pids}
    while True:
        _send(signal.SIGCONT, pids)
        time.sleep(0.05)
        _send(signal.SIGSTOP, pids)
        took = {pid: _processor_time(pid) - before[pid] for pid in pids}
        *others, busy = sorted(pids, key=took.__getitem__)
        if all(took[busy] >= took[other] + 3 for other in others):
            return busy


def _processor_time(pid: int) -> int:
    """In the system's own units."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def _await_lost(running: Running) -> int:
    """The place of the engine that is down, once one is."""
    down: list[int] = []

    def is_one_down() -> bool:
        replicas = running.http.get("/health").json()["replicas"]
        down[:] = [int(replica["replica"]) for replica in replicas if not replica["progresses"]]
        return len(down) == 1

    wait_until(is_one_down, 10)
    return down[0]


def _migrated(running: Running) -> dict[str, int]:
    return {replica["replica"]: replica["migrated"] for replica in running.replicas()}


def test_what_a_lost_frontend_asked_for_is_given_up(running: Running) -> None:
    before = sum(replica["cancelled"] for replica in running.replicas())
    body = {"model": NAME, "prompt": "x", "n": 8, "max_tokens": 4000, "stream": True}
    with running.http.stream("POST", "/v1/completions", json=body | {"ignore_eos": True}) as answer:
        lines = answer.iter_lines()
        next(lines)
        for pid in frontend_pids(running):
            os.kill(pid, signal.SIGKILL)
        # The stream is cut, or the proxy says that it failed: it is not complete.
        with suppress(httpx2.TransportError):
            assert "data: [DONE]" not in list(lines)
    wait_until(lambda: _answers(running), 30)
    running.assert_idle(10.0)
    assert sum(replica["cancelled"] for replica in running.replicas()) > before


def _answers(running: Running) -> bool:
    with suppress(httpx2.TransportError):
        return running.http.get("/health").status_code == 200
    return False


def _status(running: Running) -> str:
    return str(running.http.get("/health").json()["status"])


def test_an_engine_that_stands_still_shows_in_health_and_is_avoided(running: Running) -> None:
    """What it was computing, and what it is asked meanwhile, is answered by the other one."""
    fields = {"max_tokens": 500, "seed": 5, "ignore_eos": True, "return_token_ids": True}
    prompts = [f"number {number}" for number in range(6)]
    stopped = engine_pids(running)[0]
    cancelled = sum(replica["cancelled"] for replica in running.replicas())

    def ask(prompt: str) -> list[int]:
        answer = running.complete(prompt=prompt, **fields)
        assert answer.status_code == 200, answer.text
        return list(answer.json()["choices"][0]["token_ids"])

    try:
        with ThreadPoolExecutor(len(prompts)) as threads:
            early = [threads.submit(ask, prompt) for prompt in prompts[:3]]
            time.sleep(0.1)
            os.kill(stopped, signal.SIGSTOP)
            late = [threads.submit(ask, prompt) for prompt in prompts[3:]]
            answers = [each.result(60) for each in early + late]
        for prompt, tokens in zip(prompts, answers, strict=True):
            params = {"max_tokens": 500, "seed": 5, "ignore_eos": True}
            assert tuple(tokens) == running.direct(prompt.encode(), **params)[0].token_ids
        # Each frontend finds out for itself; so many answers are by both of them.
        wait_until(lambda: {_status(running) for _ in range(10)} == {"degraded"}, 15)
        for number in range(6):
            assert running.complete(prompt=f"{number}", temperature=0).status_code == 200
    finally:
        os.kill(stopped, signal.SIGCONT)
    wait_until(lambda: _status(running) == "ok", 10)
    assert stopped in engine_pids(running)
    running.assert_idle(10)
    # What it had is given up there.
    assert sum(replica["cancelled"] for replica in running.replicas()) > cancelled


def test_without_any_engine_requests_are_refused_until_one_is_back(running: Running) -> None:
    for pid in engine_pids(running):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: running.http.get("/health").status_code == 503, 10)
    with pytest.raises(openai.InternalServerError) as refusal:
        running.sdk.completions.create(model=NAME, prompt="Hi")
    assert refusal.value.status_code == 503 and "retry-after" in refusal.value.response.headers
    wait_until(lambda: _status(running) == "ok", 120)
    assert running.complete(temperature=0).status_code == 200
