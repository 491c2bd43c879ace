"""A frontend's tokens are those that ``transformers`` makes of the same words."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from shoal.data import load_tokenizer
from shoal.inference import Limits
from shoal_deployments.tokenizing import INLINE_CHARACTERS, Tokenizing
from tests.data.tiny import CHAT, oracle, write_tokenizer
from tests.deployments.fake_engine import FakeEngine
from tests.deployments.server import serve


@pytest.mark.parametrize("adds_start", [False, True])
@pytest.mark.parametrize("repeats", [1, INLINE_CHARACTERS])  # on the event loop, and beside it
def test_texts_begin_as_the_tokenizer_says_and_chats_as_their_template_does(
    tmp_path: Path, adds_start: bool, repeats: int
) -> None:
    folder = write_tokenizer(tmp_path, post_processor_adds_start=adds_start)
    theirs, tokenizing = oracle(folder), Tokenizing(load_tokenizer(str(folder)))
    text = "Say hello " * repeats
    chat = [*CHAT[:-1], {"role": "user", "content": text}]
    try:
        ((*ids,),) = asyncio.run(tokenizing.encode([text]))
        asked = asyncio.run(tokenizing.encode_chat(chat))
    finally:
        tokenizing.close()
    assert ids == theirs(text)["input_ids"]
    rendered = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert list(asked) == theirs(rendered, add_special_tokens=False)["input_ids"]
    start = theirs.bos_token_id
    assert (ids[0] == start) is adds_start and asked[0] != start


def test_a_chat_to_a_model_without_a_template_is_refused_without_the_servers_folder(
    tmp_path: Path,
) -> None:
    tokenizer = load_tokenizer(str(write_tokenizer(tmp_path, chat_template=None)), "model.path")
    limits = Limits(vocab_size=300, context_length=512, num_blocks=256, block_size=4)
    with serve(engine=FakeEngine(tokenizer, limits)) as served:
        for stream in (False, True):
            refused = served.chat(stream=stream)
            error = refused.json()["error"]
            assert (refused.status_code, error["param"]) == (400, "messages")
            assert "this model has no chat template. Use /v1/completions" in error["message"]
            assert str(tmp_path) not in refused.text
        assert served.complete().status_code == 200
