"""Text that comes token by token against the whole text decoded at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data import ByteTokenizer, Tokenizer
from shoal.inference import Detokenizer, TokenTexts
from tests.inference.tokenizers import FIRST_BYTE, SENTENCE_PIECES, byte_level_bpe, sentencepiece

TEXTS = ["plain", "Héllo, 世界 👋🏽!", "👩‍👩‍👧 a\n\tb", "\ufffd is real", "é", ""]
BYTES = ByteTokenizer()
BYTE_TEXTS = TokenTexts(BYTES)


def _deltas(texts: TokenTexts, tokens: list[int]) -> list[str]:
    detokenizer = Detokenizer(texts)
    return [*(detokenizer.push(token) for token in tokens), detokenizer.finish()]


@pytest.fixture(scope="module", params=["bytes", "bpe", "sentencepiece"])
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp(request.param)
    if request.param == "bytes":
        return BYTES
    return (byte_level_bpe if request.param == "bpe" else sentencepiece)(folder)


@pytest.mark.parametrize("text", TEXTS)
def test_deltas_join_to_the_text_and_split_no_character(tokenizer: Tokenizer, text: str) -> None:
    tokens = tokenizer.encode(text)
    *deltas, tail = _deltas(TokenTexts(tokenizer), tokens)
    # Behind other text, as an answer is, a sentencepiece text keeps its first space.
    assert "".join(deltas).lstrip(" ") == tokenizer.decode(tokens) == text
    assert tail == ""
    if "\ufffd" not in text:
        assert not any("\ufffd" in delta for delta in deltas)


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_character_that_was_cut_off_ends_the_text_as_decode_does(
    tokenizer: Tokenizer, cut: int
) -> None:
    tokens = tokenizer.encode("a👋")
    tokens = tokens[: len(tokens) - cut]
    *deltas, tail = _deltas(TokenTexts(tokenizer), tokens)
    assert "".join(deltas).lstrip(" ") == "a"
    assert ("a" + tail) == tokenizer.decode(tokens)
    assert set(tail) == {"\ufffd"}


@settings(max_examples=300)
@given(st.lists(st.integers(0, 256), max_size=40))
def test_any_bytes_come_out_as_decode_has_them(tokens: list[int]) -> None:
    deltas = _deltas(BYTE_TEXTS, tokens)
    assert "".join(deltas) == BYTES.decode(tokens)


@settings(max_examples=300)
@given(st.text(max_size=12), st.binary(max_size=4), st.text(max_size=12))
def test_characters_come_out_as_soon_as_they_are_whole(
    before: str, damage: bytes, after: str
) -> None:
    damage = bytes(byte | 0x80 for byte in damage)
    tokens = [*before.encode(), *damage, *after.encode()]
    detokenizer = Detokenizer(BYTE_TEXTS)
    shown = ""
    for count, token in enumerate(tokens, 1):
        shown += detokenizer.push(token)
        # At most the bytes of one unfinished character, and of damage that looks like one, wait.
        assert len(BYTES.decode(tokens[:count])) - len(shown) <= 3
        assert BYTES.decode(tokens).startswith(shown)


def _random_tokens(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=24)


@settings(max_examples=100)
@given(st.data())
def test_any_tokens_of_a_bpe_come_out_as_decode_has_them(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    tokenizer = byte_level_bpe(tmp_path_factory.mktemp("bpe"))
    tokens = data.draw(_random_tokens(tokenizer))
    assert "".join(_deltas(TokenTexts(tokenizer), tokens)) == tokenizer.decode(tokens)


def test_special_tokens_have_no_text(tokenizer: Tokenizer) -> None:
    tokens = [*tokenizer.encode("a👋"), tokenizer.end_of_text]
    assert _deltas(TokenTexts(tokenizer), tokens)[-2:] == ["", ""]


def test_ids_that_only_the_model_has_have_no_text(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("a👋")
    tokens.insert(2, tokenizer.vocab_size + 5)
    assert "".join(_deltas(TokenTexts(tokenizer), tokens)).lstrip(" ") == "a👋"


def test_a_continuation_keeps_its_space(tmp_path: Path) -> None:
    tokenizer = sentencepiece(tmp_path)
    texts = TokenTexts(tokenizer)
    world = [FIRST_BYTE + 256 + SENTENCE_PIECES.index("▁world")]
    assert tokenizer.decode(world) == "world"
    assert texts.one(world[0]) == " world" == "".join(_deltas(texts, world))


def test_damage_in_a_run_of_byte_tokens_leaves_the_characters_before_it(tmp_path: Path) -> None:
    tokenizer = sentencepiece(tmp_path)
    euro = [FIRST_BYTE + byte for byte in "€".encode()]
    damaged = [*euro, FIRST_BYTE + 0xFF, *tokenizer.encode("a")]
    assert tokenizer.decode(damaged) == "\ufffd" * 4 + " a"
    assert "".join(_deltas(TokenTexts(tokenizer), damaged)) == "€\ufffd a"


def test_endless_damage_costs_the_same_per_token(tokenizer: Tokenizer) -> None:
    texts = TokenTexts(tokenizer)
    damage = next(
        token for token in range(tokenizer.vocab_size) if texts.many([token, token]) == "\ufffd" * 2
    )
    detokenizer = Detokenizer(texts)
    shown = "".join(detokenizer.push(damage) for _ in range(300))
    assert len(detokenizer._pending) <= 4
    assert shown + detokenizer.finish() == "\ufffd" * 300


class _CountedTexts(TokenTexts):
    num_decoded = 0

    def many(self, tokens: list[int]) -> str:
        self.num_decoded += len(tokens)
        return super().many(tokens)


def test_no_token_of_plain_text_is_decoded_twice(tokenizer: Tokenizer) -> None:
    texts = _CountedTexts(tokenizer)
    tokens = tokenizer.encode("a, ab, a") * 50
    assert len(_deltas(texts, tokens)) == len(tokens) + 1
    assert texts.num_decoded == len(set(tokens))
