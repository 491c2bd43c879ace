"""Tokenizers against ``transformers`` and against themselves."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.data import ByteTokenizer, check_vocabulary, load_tokenizer, tokenizer_name
from shoal.errors import ConfigError
from tests.data.tiny import CHAT, CHATML, oracle, write_tokenizer

TEXT = "Say héllo <|im_end|> to 世界 👋\n\n  twice\t\x00"


@given(st.text())
def test_bytes_there_and_back(text: str) -> None:
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode_document(text)
    assert tokens == [*text.encode(), 256]
    assert tokenizer.decode(tokens) == text
    assert max(tokens) < tokenizer.vocab_size


def test_bytes_of_a_lone_surrogate_are_the_replacement_character() -> None:
    assert ByteTokenizer().encode("a\ud83db") == list("a\ufffdb".encode())
    assert ByteTokenizer().encode("\ud83d\udc4b") == list("👋".encode())


def test_bytes_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(ValueError, match="token 257"):
        ByteTokenizer().decode([65, 257])


def test_a_chat_of_bytes_teaches_the_assistants_words_and_their_end() -> None:
    tokenizer = ByteTokenizer()
    chat = tokenizer.encode_chat(
        [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Yo"},
            {"role": "user", "content": "Bye"},
        ]
    )
    labels = [token for token, counts in zip(chat.tokens, chat.is_label, strict=True) if counts]
    assert labels == [*b"Yo", 256]
    prompt = b"<|user|>\nHi\n<|assistant|>\n"
    assert chat.tokens == [*prompt, *b"Yo", 256, *b"\n<|user|>\nBye", 256]
    # What the model sees when asked is a prefix of what it was trained on.
    assert tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}]) == list(prompt)


@pytest.mark.parametrize(
    ("settings", "post_processor_adds_start"),
    [({}, False), ({}, True), ({"add_bos_token": True}, False), ({"add_bos_token": False}, True)],
)
def test_documents_as_transformers_tokenizes_them(
    tmp_path: Path, settings: dict[str, Any], post_processor_adds_start: bool
) -> None:
    folder = write_tokenizer(
        tmp_path, post_processor_adds_start=post_processor_adds_start, **settings
    )
    ours = load_tokenizer(str(folder))
    theirs = oracle(folder)
    assert ours.encode(TEXT) == theirs(TEXT, add_special_tokens=False)["input_ids"]
    assert ours.encode_prompt(TEXT) == theirs(TEXT)["input_ids"]
    assert ours.encode_document(TEXT) == [*theirs(TEXT)["input_ids"], theirs.eos_token_id]
    assert ours.end_of_text == theirs.eos_token_id
    assert ours.vocab_size == len(theirs)
    tokens = ours.encode(TEXT)
    assert ours.decode(tokens) == theirs.decode(tokens, skip_special_tokens=True)


def test_a_document_is_neither_cut_nor_padded(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, cuts_and_pads=True)
    assert load_tokenizer(str(folder)).decode(load_tokenizer(str(folder)).encode(TEXT)) == (
        TEXT.replace("<|im_end|>", "")
    )
    assert len(load_tokenizer(str(folder)).encode("a")) == 1


def test_end_of_text_is_not_doubled(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(write_tokenizer(tmp_path)))
    tokens = tokenizer.encode_document("done<|im_end|>")
    assert tokens.count(tokenizer.end_of_text) == 1


def test_a_lone_surrogate_reaches_the_tokenizer_as_u_fffd(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(write_tokenizer(tmp_path)))
    assert tokenizer.encode("a\ud83db") == tokenizer.encode("a\ufffdb")
    chat = [{"role": "user", "content": "\ud83d"}, {"role": "assistant", "content": "yes"}]
    marked = [{"role": "user", "content": "\ufffd"}, {"role": "assistant", "content": "yes"}]
    assert tokenizer.encode_chat(chat) == tokenizer.encode_chat(marked)


def test_a_pickled_tokenizer_is_the_same(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(write_tokenizer(tmp_path)))
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert copy.fingerprint == tokenizer.fingerprint
    assert copy.encode_document(TEXT) == tokenizer.encode_document(TEXT)
    assert copy.encode_chat(CHAT) == tokenizer.encode_chat(CHAT)


def test_the_fingerprint_follows_what_decides_about_tokens(tmp_path: Path) -> None:
    plain = load_tokenizer(str(write_tokenizer(tmp_path / "a")))
    copy = load_tokenizer(str(write_tokenizer(tmp_path / "b")))
    others = [
        load_tokenizer(str(write_tokenizer(tmp_path / "c", chat_template=CHATML + " "))),
        load_tokenizer(str(write_tokenizer(tmp_path / "d", post_processor_adds_start=True))),
        load_tokenizer(str(write_tokenizer(tmp_path / "e", eos_token="<|end|>"))),
        load_tokenizer("bytes"),
    ]
    assert plain.fingerprint == copy.fingerprint
    assert len({plain.fingerprint, *(other.fingerprint for other in others)}) == 5


def test_special_tokens_may_stand_in_a_file_of_their_own(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, eos_token=None)
    (folder / "special_tokens_map.json").write_text('{"eos_token": "<|end|>"}')
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["eos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(str(folder)).end_of_text == 1


EMPTY = '{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}'


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("tokenizer.json", None, "no tokenizer.json"),
        ("tokenizer.json", "{", "cannot be loaded"),
        ("tokenizer_config.json", "[1]", "not a JSON object"),
        ("tokenizer_config.json", "{", "not JSON"),
        ("tokenizer_config.json", "{}", "its eos_token is None"),
        ("tokenizer_config.json", '{"eos_token": "<eos>"}', "its eos_token is '<eos>'"),
        ("tokenizer.json", EMPTY, "has no tokens"),
        ("tokenizer.json", b"\xff\xfe", "not UTF-8"),
        ("tokenizer_config.json", b"\xff", "not UTF-8"),
        ("tokenizer_config.json", "[" * 100_000, "nested too deeply"),
        ("tokenizer_config.json", '{"eos_token": 1}', "its eos_token is 1, which is no text"),
        ("tokenizer_config.json", '{"eos_token": {}}', "its eos_token is {}, which is no text"),
        ("tokenizer_config.json", '{"bos_token": ["a"]}', "its bos_token is .*no text"),
        ("tokenizer_config.json", '{"chat_template": 1}', "its chat template is 1"),
        ("tokenizer_config.json", '{"chat_template": [1, {}]}', "none of its chat templates"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "default"}, 1]}', "eos_token is N"),
        ("chat_template.jinja", b"\xff", "not UTF-8"),
        ("chat_template.jinja", "{% if %}", "not valid Jinja"),
        (
            "tokenizer_config.json",
            '{"eos_token": "<|end|>", "chat_template": [{"name": "rag", "template": ""}]}',
            "none of its chat templates \\(rag\\)",
        ),
    ],
)
def test_a_damaged_folder_is_refused(
    tmp_path: Path, name: str, content: str | bytes | None, problem: str
) -> None:
    folder = write_tokenizer(tmp_path)
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ConfigError, match=problem) as refusal:
        load_tokenizer(str(folder))
    assert refusal.value.field == "data.tokenizer"


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        load_tokenizer(str(tmp_path / "absent"))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="it is a file"):
        load_tokenizer(str(tmp_path / "file"))


def test_a_tokenizer_larger_than_the_models_vocabulary_is_refused() -> None:
    check_vocabulary(ByteTokenizer(), 257)
    with pytest.raises(ConfigError, match="257 tokens and the model's vocabulary only 256"):
        check_vocabulary(ByteTokenizer(), 256)


def test_which_tokenizer_a_run_uses(tmp_path: Path) -> None:
    folder = str(write_tokenizer(tmp_path / "model"))
    assert tokenizer_name("bytes", folder) == "bytes"
    assert tokenizer_name(None, folder) == folder
    assert tokenizer_name(None, str(tmp_path)) == "bytes"
    assert tokenizer_name(None, None) == "bytes"
