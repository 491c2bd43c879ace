"""A very long prompt holds up nobody else."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import httpx2
import pytest

from shoal.inference import Limits
from tests.deployments.fake_engine import FakeEngine
from tests.deployments.gated_tokenizer import GatedTokenizer
from tests.deployments.server import DEADLINE_S, serve

LENGTH = 10**6
"""Characters, each a token."""


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_streams_go_on_while_a_long_prompt_is_tokenized(path: str) -> None:
    limits = Limits(vocab_size=300, context_length=10**7, num_blocks=10**7, block_size=1)
    tokenizer, text = GatedTokenizer(), "x" * LENGTH
    long: dict[str, object] = {"model": "tiny", "max_tokens": 1}
    long |= {"prompt": text} if path == "completions" else _chat(text)
    short = {"model": "tiny", "prompt": "x", "stream": True, "max_tokens": 10**6}
    with (
        serve(engine=FakeEngine(tokenizer, limits)) as served,
        httpx2.Client(base_url=served.url, timeout=DEADLINE_S) as client,
        ThreadPoolExecutor(1) as beside,
    ):
        try:
            with client.stream("POST", "/v1/completions", json=short) as response:
                events = response.iter_lines()
                answer = beside.submit(served.http.post, f"/v1/{path}", json=long)
                while not tokenizer.has_begun.is_set():
                    next(events)
                assert len(list(islice(events, 100))) == 100
                assert served.http.get("/health").status_code == 200
                assert not answer.done()
        finally:
            tokenizer.may_go_on.set()
        assert answer.result().json()["usage"]["prompt_tokens"] > LENGTH - 1
        served.assert_idle()


def _chat(text: str) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": text}]}
