"""Good, spoiled and senseless requests to a real server; ``python -m tests.deployments.fuzz``.

drawn bodies ── 8 clients ──┐
                            ├──> proxy ── frontend ── engine, of a small model
a neighbour, who asks the ──┘
same thing all the time          no 5xx but a documented 503, no process lost, no memory either,
                                 and the neighbour's answer is always the same
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import hypothesis.strategies as st
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.deployments.bodies import PATHS, bodies, spoiled
from tests.deployments.running import NAME, Running, engine_pids, frontend_pids, shoal_serve
from tests.deployments.test_bad_input import CHATS, COMPLETIONS, MESSAGE
from tests.deployments.test_raw_bodies import BODIES

NUM_REQUESTS = 10_000
NUM_CLIENTS = 8
ROUND = 500
"""Requests that are drawn and sent between two looks at the processes."""
SETTLED = 0.3
"""Share of the requests after which processes have the size that they keep."""
MAY_GROW = 16 * 2**20
"""Bytes that a process may grow from then on."""

REFUSED = {429, 503}
ALLOWED = {200, 400, 404, 413} | REFUSED


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One request."""

    path: str
    content: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The server's processes at a moment."""

    num_sent: int
    frontends: dict[int, int]
    """Resident bytes by process."""
    engines: dict[int, int]


def drawn(strategy: st.SearchStrategy[Case], number: int, start: int) -> list[Case]:
    """``number`` values, the same for the same ``start``."""
    found: list[Case] = []

    @seed(start)
    @settings(
        max_examples=number,
        database=None,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def draw(case: Case) -> None:
        found.append(case)

    draw()
    return found


def cases(document: dict[str, Any], start: int) -> list[Case]:
    """``ROUND`` requests of all kinds in a mixed order."""

    def by_schema(path: str) -> st.SearchStrategy[Case]:
        return bodies(path, document, NAME).map(
            lambda body: Case(path=path, content=json.dumps(body).encode())
        )

    def cut(path: str) -> st.SearchStrategy[Case]:
        return spoiled(path, document, NAME).map(lambda text: Case(path=path, content=text))

    noise = st.builds(Case, path=st.sampled_from(PATHS), content=st.binary(max_size=60))
    found = [
        *drawn(st.one_of(*map(by_schema, PATHS)), ROUND * 6 // 10, start),
        *drawn(st.one_of(*map(cut, PATHS)), ROUND * 15 // 100, start),
        *drawn(noise, ROUND // 10, start),
    ]
    known = itertools.islice(itertools.cycle(known_cases()), start * ROUND, None)
    found += itertools.islice(known, ROUND - len(found))
    random.Random(start).shuffle(found)
    return found


def known_cases() -> list[Case]:
    """Every bad input that has a test of its own, and a body of five megabytes."""
    completion = {"model": NAME, "prompt": "Hi", "max_tokens": 4}
    chat = {"model": NAME, "messages": [MESSAGE], "max_tokens": 4}
    completions, chats = PATHS
    laid_over = [
        *((completions, completion | fields) for fields, _ in COMPLETIONS),
        *((chats, chat | fields) for fields, _ in CHATS),
        (completions, completion | {"prompt": "x" * (5 * 2**20)}),
    ]
    return [
        *(Case(path=path, content=json.dumps(body).encode()) for path, body in laid_over),
        *(Case(path=path, content=body) for path in PATHS for body in BODIES.values()),
    ]


def send(running: Running, case: Case) -> int:
    """The status; AssertionError for an answer that is not as documented."""
    headers = {"Content-Type": "application/json"}
    response = running.http.post(case.path, content=case.content, headers=headers)
    status = response.status_code
    shown = f"{case.path} {case.content[:500]!r}: {status} {response.text[:500]}"
    assert status in ALLOWED, shown
    if status != 200:
        assert response.json()["error"]["message"], shown
        assert status not in REFUSED or "retry-after" in response.headers, shown
    elif response.headers["content-type"].startswith("text/event-stream"):
        assert response.text.endswith("data: [DONE]\n\n") and '{"error"' not in response.text, shown
    else:
        assert all(choice["finish_reason"] for choice in response.json()["choices"]), shown
    return status


class Neighbour:
    """Asks the same thing until it is told to stop, and counts other answers than the first.

    A refusal for want of room is no answer.
    """

    def __init__(self, running: Running) -> None:
        self._running = running
        self._expected = self._ask().json()["choices"]
        self.num_alike = 0
        self.num_different = 0
        self._stop = threading.Event()

    def _ask(self) -> httpx2.Response:
        prompt = "Whatever the others ask"
        return self._running.complete(prompt=prompt, max_tokens=24, temperature=0, logprobs=2)

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Ask for as long as the block lasts."""
        thread = threading.Thread(target=self._run)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.02):
            answer = self._ask()
            if answer.status_code in REFUSED:
                continue
            is_alike = answer.status_code == 200 and answer.json()["choices"] == self._expected
            self.num_alike += is_alike
            self.num_different += not is_alike


def look(running: Running, num_sent: int) -> Look:
    """The processes now."""
    return Look(
        num_sent=num_sent,
        frontends={pid: _resident(pid) for pid in frontend_pids(running)},
        engines={pid: _resident(pid) for pid in engine_pids(running)},
    )


def _resident(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (found,) = (line for line in lines if line.startswith("VmRSS:"))
    return int(found.split()[1]) * 1024


def fuzz(running: Running, num_requests: int) -> None:
    """Send them all; AssertionError for the first thing that must not be."""
    document = running.http.get("/openapi.json").json()
    neighbour, statuses = Neighbour(running), Counter[int]()
    looks = [look(running, 0)]
    with neighbour.asking(), ThreadPoolExecutor(NUM_CLIENTS) as clients:
        for start in range(num_requests // ROUND):
            statuses.update(clients.map(lambda case: send(running, case), cases(document, start)))
            looks.append(look(running, sum(statuses.values())))
            _say(f"{looks[-1].num_sent} sent, {_sizes(looks[-1])}")
    counts = ", ".join(f"{status}: {count}" for status, count in sorted(statuses.items()))
    _say(f"statuses {counts}; the neighbour: {neighbour.num_alike} times alike")
    running.assert_idle(2.0)
    assert running.http.get("/health").json()["status"] == "ok"
    complaints = [line for line in running.complaints() if "Status 503" not in line]
    assert complaints == [], complaints
    assert neighbour.num_alike > 0 and neighbour.num_different == 0
    _check(looks)


def _check(looks: list[Look]) -> None:
    first, last = looks[0], looks[-1]
    assert first.engines.keys() == last.engines.keys(), "an engine was lost"
    assert first.frontends.keys() == last.frontends.keys(), "a frontend was lost"
    settled = next(each for each in looks if each.num_sent >= SETTLED * last.num_sent)
    for before, after in ((settled.engines, last.engines), (settled.frontends, last.frontends)):
        for pid, size in after.items():
            assert size - before[pid] < MAY_GROW, f"process {pid} grew: {before[pid]} to {size}"


def _sizes(look: Look) -> str:
    def shown(sizes: dict[int, int]) -> str:
        return " ".join(f"{size / 2**20:.1f}" for size in sizes.values())

    return f"MiB of engines {shown(look.engines)}, of frontends {shown(look.frontends)}"


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> None:
    """Fuzz a server of one engine whose model knows few positions, so that answers are short."""
    num_requests = int(sys.argv[1]) if len(sys.argv) > 1 else NUM_REQUESTS
    with (
        tempfile.TemporaryDirectory() as folder,
        shoal_serve(Path(folder), max_position_embeddings=128) as running,
    ):
        fuzz(running, num_requests)


if __name__ == "__main__":
    main()
