"""A frontend's tokens are those that ``transformers`` makes of the same words."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from shoal.data import load_tokenizer
from shoal_deployments.tokenizing import INLINE_CHARACTERS, Tokenizing
from tests.data.tiny import CHAT, oracle, write_tokenizer


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
