"""What tokens are called by themselves, and the bytes that they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.data import ByteTokenizer, Tokenizer
from shoal.inference.text import TokenNames, TokenTexts
from tests.inference.tokenizers import FIRST_BYTE, SENTENCE_PIECES, byte_level_bpe, sentencepiece


def _tokenizer(kind: str, folder: Path) -> Tokenizer:
    if kind == "bytes":
        return ByteTokenizer()
    return (byte_level_bpe if kind == "bpe" else sentencepiece)(folder)


@pytest.fixture(params=["bytes", "bpe", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    return _tokenizer(request.param, tmp_path)


def _names(tokenizer: Tokenizer) -> TokenNames:
    return TokenNames(tokenizer, TokenTexts(tokenizer))


@pytest.mark.parametrize(
    "text", ["plain", "Héllo, 世界 👋🏽!", "say\tHello world\n", "\ufffd is real"]
)
def test_bytes_joined_are_those_of_the_text(tokenizer: Tokenizer, text: str) -> None:
    names = _names(tokenizer)
    parts = [names.of(token).data for token in tokenizer.encode(text)]
    # Behind other text, as an answer is, a sentencepiece text keeps its first space.
    assert b"".join(part for part in parts if part is not None).lstrip(b" ") == text.encode()
    assert None not in parts


def test_no_two_tokens_have_one_name_but_those_of_one_text(tokenizer: Tokenizer) -> None:
    names = _names(tokenizer)
    tokens = range(tokenizer.vocab_size + 3)
    by_name: dict[str, set[bytes | None]] = {}
    for token in tokens:
        name = names.of(token)
        by_name.setdefault(name.text, set()).add(name.data)
        assert name.text and "\ufffd" not in name.text
    assert all(len(datas) == 1 for datas in by_name.values())
    # Of the third one's pieces, these are single bytes as well.
    num_shared = len({"a", ",", "h", "\n", "▁"}) if tokenizer.special_text(0) == "<unk>" else 0
    assert len(by_name) == len(tokens) - num_shared


def test_all_bytes_are_there(tokenizer: Tokenizer) -> None:
    names = _names(tokenizer)
    found = {names.of(token).data for token in range(tokenizer.vocab_size)}
    assert {bytes([byte]) for byte in range(256)} <= found


def test_parts_of_characters_are_called_by_their_ids(tmp_path: Path) -> None:
    for kind, first in (("bytes", 0), ("sentencepiece", FIRST_BYTE)):
        name = _names(_tokenizer(kind, tmp_path / kind)).of(first + 0xC3)
        assert (name.text, name.data) == (f"token_id:{first + 0xC3}", b"\xc3")


def test_special_tokens_are_called_as_they_are_spelled(tokenizer: Tokenizer) -> None:
    names = _names(tokenizer)
    end = names.of(tokenizer.end_of_text)
    assert end.text in ("<|endoftext|>", "<|im_end|>", "</s>") and end.data is None
    assert names.piece(tokenizer.end_of_text) == ""
    padded = names.of(tokenizer.vocab_size + 5)
    assert (padded.text, padded.data) == (f"token_id:{tokenizer.vocab_size + 5}", None)


def test_a_piece_keeps_its_space(tmp_path: Path) -> None:
    world = FIRST_BYTE + 256 + SENTENCE_PIECES.index("▁world")
    name = _names(sentencepiece(tmp_path)).of(world)
    assert (name.text, name.data) == (" world", b" world")
