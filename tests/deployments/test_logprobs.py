"""Which bytes a token has over HTTP, and that no likely token is lost among others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.inference import TokenLogprob
from shoal.inference.text import TokenNames, TokenTexts
from shoal_deployments.openai.logprobs import completion_logprobs
from tests.deployments.fake_engine import FakeEngine, spelling
from tests.deployments.server import Served, events, serve
from tests.inference.tokenizers import FIRST_BYTE, SENTENCE_PIECES, sentencepiece

PARTS = (0xC3, 0xE6, 256, 97)
"""Two beginnings of characters, end-of-text, and a letter."""


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    engine = FakeEngine()
    engine.next_token = spelling("é", ends=True)
    engine.alternatives = PARTS
    with serve(engine=engine) as served:
        yield served


def _streamed(response: Any, name: str) -> list[Any]:
    choices = [choice for event in events(response)[:-1] for choice in event["choices"]]
    return [entry for choice in choices for entry in (choice["logprobs"] or {}).get(name, [])]


def test_each_alternative_has_the_bytes_that_it_is(served: Served) -> None:
    asked: dict[str, Any] = {"logprobs": True, "top_logprobs": 4}
    content = served.chat(**asked).json()["choices"][0]["logprobs"]["content"]
    assert [(entry["token"], entry["bytes"]) for entry in content] == [
        ("", [0xC3]),
        ("é", [0xA9]),
        ("", None),
    ]
    assert [(each["token"], each["bytes"]) for each in content[1]["top_logprobs"]] == [
        ("é", [0xA9]),
        ("token_id:195", [0xC3]),
        ("token_id:230", [0xE6]),
        ("<|endoftext|>", None),
    ]
    assert _streamed(served.chat(**asked, stream=True), "content") == content


def test_no_alternative_is_lost_where_none_has_a_text(served: Served) -> None:
    asked = {"logprobs": 4}
    top = served.complete(**asked).json()["choices"][0]["logprobs"]["top_logprobs"]
    assert [list(named) for named in top] == [
        ["", "token_id:230", "<|endoftext|>", "a"],
        ["é", "token_id:195", "token_id:230", "<|endoftext|>"],
        ["", "token_id:195", "token_id:230", "a"],
    ]
    assert _streamed(served.complete(**asked, stream=True), "top_logprobs") == top


def test_of_two_tokens_with_one_text_the_second_is_called_by_its_id(tmp_path: Path) -> None:
    tokenizer = sentencepiece(tmp_path)
    names = TokenNames(tokenizer, TokenTexts(tokenizer))
    piece, single = FIRST_BYTE + 256 + SENTENCE_PIECES.index("a"), FIRST_BYTE + ord("a")
    top = ((piece, -0.5), (single, -1.0))
    entry = TokenLogprob(token=piece, logprob=-0.5, text="a", offset=0, top=top)
    written = completion_logprobs([entry], 0, names)
    assert written["top_logprobs"] == [{"a": -0.5, f"token_id:{single}": -1.0}]
