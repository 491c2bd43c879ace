"""From the configuration to sequences."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.config import DataSettings, SourceSettings
from shoal.data import (
    IGNORED,
    Batch,
    ByteTokenizer,
    DatasetSpec,
    SequenceDataset,
    Shard,
    ShardFunction,
    ShardResult,
    load_tokenizer,
    prepare,
    run_locally,
    tokenize_documents,
)
from shoal.data.document import Origin, TextDocument
from shoal.data.indexed_writer import IndexedWriter
from shoal.errors import ConfigError, WorkError
from tests.data.tiny import CHAT, write_tokenizer
from tests.short_disk import file_size_limit

BYTES = ByteTokenizer()


def _settings(*sources: Path | dict[str, Any], seq_len: int = 16) -> DataSettings:
    return DataSettings(
        sources=tuple(
            SourceSettings(**source)
            if isinstance(source, dict)
            else SourceSettings(path=str(source))
            for source in sources
        ),
        seq_len=seq_len,
    )


def _text(spec: DatasetSpec) -> bytes:
    """Everything that the sequences hold, padding left out."""
    dataset = SequenceDataset(spec)
    tokens = np.concatenate([dataset[number].tokens for number in range(len(dataset))])
    return bytes(token for token in tokens.tolist() if token < 256)


class _Counting:
    """A runner that counts the shards it is given, in the reverse order."""

    def __init__(self) -> None:
        self.shards = 0

    def __call__(self, function: ShardFunction, shards: Sequence[Shard]) -> list[ShardResult]:
        self.shards += len(shards)
        return run_locally(function, shards[::-1])[::-1]


def test_all_formats_end_to_end(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "a.md").write_text("# One")
    (tmp_path / "tree" / "b.py").write_text("two = 2")
    (tmp_path / "rows.jsonl").write_text('{"text": "three"}\n{"text": "four"}')
    with IndexedWriter(tmp_path / "ready", 257) as writer:
        writer.add([*b"five", 256])
    spec = prepare(
        _settings(tmp_path / "tree", tmp_path / "rows.jsonl", tmp_path / "ready"),
        BYTES,
        tmp_path / "cache",
    )
    assert _text(spec) == b"# Onetwo = 2threefourfive"
    assert spec.num_labels == 5 + 7 + 5 + 4 + 4
    dataset = SequenceDataset(spec)
    batch = Batch.load(dataset, range(len(dataset)))
    assert int((batch.labels != IGNORED).sum()) == spec.num_labels


def test_text_is_tokenized_once(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    (tmp_path / "b.txt").write_text("world")
    runner = _Counting()

    def run(*names: str, tokenizer: Any = BYTES, **settings: Any) -> int:
        """Shards that had to be tokenized."""
        before = runner.shards
        sources = [{"path": str(tmp_path / name), **settings} for name in names]
        prepare(_settings(*sources), tokenizer, tmp_path / "cache", run_shards=runner)
        return runner.shards - before

    assert run("a.txt") == 1
    assert run("a.txt") == 0
    assert run("a.txt", "b.txt") == 1  # the first source is known
    assert run("a.txt", weight=2.0) == 0  # shares do not change tokens
    assert run("a.txt", text_key="body") == 1
    assert run("a.txt", tokenizer=load_tokenizer(str(write_tokenizer(tmp_path / "bpe")))) == 1
    (tmp_path / "a.txt").write_text("hallo")
    os.utime(tmp_path / "a.txt", ns=(1, 1))
    assert run("a.txt") == 1


def test_the_bytes_on_disk_do_not_depend_on_the_shards(tmp_path: Path) -> None:
    chat = json.dumps({"messages": CHAT})
    rows = [json.dumps({"text": f"row {number}"}) for number in range(9)]
    (tmp_path / "rows.jsonl").write_text("\n".join([*rows, chat, *rows]))
    (tmp_path / "tree").mkdir()
    for number in range(5):
        (tmp_path / "tree" / f"{number}.txt").write_text(f"file {number} " * number)
    settings = _settings(tmp_path / "rows.jsonl", tmp_path / "tree")
    tokenizer = load_tokenizer(str(write_tokenizer(tmp_path / "bpe")))
    contents = []
    for shard_bytes in (10, 100, 2**20):
        runner = _Counting()
        cache = tmp_path / f"cache-{shard_bytes}"
        spec = prepare(settings, tokenizer, cache, run_shards=runner, shard_bytes=shard_bytes)
        assert runner.shards > 10 or shard_bytes > 10
        files = sorted(path for path in cache.rglob("*") if path.is_file())
        assert len(files) == 2 * 3 + 2  # two pairs, two summaries, one mask; no shard is left
        contents.append([path.read_bytes() for path in files])
    assert contents[0] == contents[1] == contents[2]
    assert spec.num_labels > 0


def test_a_chat_source_teaches_the_assistants_words(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "Hi there"}, {"role": "assistant", "content": "Yo"}]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": chat}))
    spec = prepare(_settings(tmp_path / "chat.jsonl", seq_len=64), BYTES, tmp_path / "cache")
    labels = SequenceDataset(spec)[0].labels
    assert labels[labels != IGNORED].tolist() == [*b"Yo", 256]
    assert spec.num_labels == 3


def test_one_sentence_is_a_corpus(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("A sentence.")
    spec = prepare(_settings(tmp_path / "a.txt", seq_len=512), BYTES, tmp_path / "cache")
    (sample,) = [SequenceDataset(spec)[0]]
    assert sample.labels.tolist() == [*b" sentence.", 256] + [IGNORED] * 501
    assert spec.num_sequences == 1


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("user_only.jsonl", '{"messages": [{"role": "user", "content": "Hi"}]}', "nothing to pred"),
        ("blank.jsonl", "\n\n", "it holds no document"),
        ("empty_rows.jsonl", '{"text": ""}', "it holds no document"),
        ("absent.txt", None, "no such file"),
    ],
)
def test_nothing_to_learn_is_refused(
    tmp_path: Path, name: str, content: str | None, problem: str
) -> None:
    (tmp_path / "good.txt").write_text("good")
    if content is not None:
        (tmp_path / name).write_text(content)
    cache = tmp_path / "cache"
    with pytest.raises(ConfigError, match=problem) as refusal:
        prepare(_settings(tmp_path / "good.txt", tmp_path / name), BYTES, cache)
    assert refusal.value.field == "data.sources.1.path"
    assert prepare(_settings(tmp_path / "good.txt"), BYTES, cache).num_labels == 4


def test_a_mistake_in_the_last_source_is_found_before_work_starts(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("good")
    (tmp_path / "b.jsonl").write_text('{"txt": "bad"}')
    with pytest.raises(ConfigError, match="'txt'") as refusal:
        prepare(_settings(tmp_path / "a.txt", tmp_path / "b.jsonl"), BYTES, tmp_path / "cache")
    assert refusal.value.field == "data.sources.1.text_key"
    assert not (tmp_path / "cache").exists()


def test_a_mistake_deep_in_a_source_leaves_nothing_behind(tmp_path: Path) -> None:
    bad_chat = {"messages": [{"role": "user", "content": 1}]}
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n' + json.dumps(bad_chat))
    with pytest.raises(ConfigError, match="line 2.*content of message 1") as refusal:
        prepare(_settings(tmp_path / "a.jsonl"), BYTES, tmp_path / "cache")
    assert refusal.value.field == "data.sources.0.messages_key"
    assert not list((tmp_path / "cache").iterdir())


def test_damaged_bytes_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    with caplog.at_level(logging.WARNING):
        prepare(_settings(tmp_path / "a.txt"), BYTES, tmp_path / "cache")
    assert "1 documents" in caplog.text and "not UTF-8" in caplog.text


@pytest.mark.parametrize("name", ["tokens.bin", "tokens.idx", "summary.json"])
@pytest.mark.parametrize("content", [None, b""])
def test_a_damaged_cache_is_built_again(tmp_path: Path, name: str, content: bytes | None) -> None:
    (tmp_path / "a.txt").write_text("hello")
    settings = _settings(tmp_path / "a.txt")
    first = prepare(settings, BYTES, tmp_path / "cache")
    (folder,) = (tmp_path / "cache").iterdir()
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    assert prepare(settings, BYTES, tmp_path / "cache") == first
    assert _text(first) == b"hello"


def test_concurrent_builders_agree(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"{number:02d}.txt").write_text(f"text {number} " * 20)
    settings = _settings({"path": str(tmp_path), "include": ("*.txt",)})
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(prepare, settings, BYTES, tmp_path / "cache") for _ in range(4)]
        specs = {job.result() for job in jobs}
    assert len(specs) == 1
    assert len(list((tmp_path / "cache").iterdir())) == 1
    assert _text(specs.pop()).startswith(b"text 0 text 0")


def test_tokens_beyond_the_models_vocabulary_are_refused(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "ready", 300) as writer:
        writer.add([1, 299, 3])
    settings = _settings(tmp_path / "ready")
    with pytest.raises(ConfigError, match="run from 1 to 299.*has 299 entries") as refusal:
        prepare(settings, BYTES, tmp_path / "cache", vocab_size=299)
    assert refusal.value.field == "data.sources.0.path"
    assert prepare(settings, BYTES, tmp_path / "cache", vocab_size=300).num_labels == 2
    with pytest.raises(ConfigError, match="only 256") as refusal:
        prepare(settings, BYTES, tmp_path / "cache", vocab_size=256)
    assert refusal.value.field == "data.tokenizer"


def test_a_ready_source_keeps_its_mask(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "ready", 257) as writer:
        writer.add([1, 2, 3, 4], [False, False, True, False])
        writer.add([5, 6])
    spec = prepare(_settings(tmp_path / "ready.idx"), BYTES, tmp_path / "cache")
    labels = SequenceDataset(spec)[0].labels
    assert labels[labels != IGNORED].tolist() == [3, 6]
    assert spec.num_labels == 2


def test_a_damaged_ready_source_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ready.bin").write_bytes(b"1234")
    settings = _settings({"path": str(tmp_path / "ready"), "format": "megatron"})
    with pytest.raises(ConfigError, match="ready.idx does not exist"):
        prepare(settings, BYTES, tmp_path / "cache")
    (tmp_path / "ready.idx").write_bytes(b"no index")
    with pytest.raises(ConfigError, match="cut short") as refusal:
        prepare(settings, BYTES, tmp_path / "cache")
    assert refusal.value.field == "data.sources.0.path"


def test_weights_are_for_all_sources_or_none(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    path = str(tmp_path / "a.txt")
    settings = _settings({"path": path, "weight": 2.0}, {"path": path})
    with pytest.raises(ConfigError, match="this one has none") as refusal:
        prepare(settings, BYTES, tmp_path / "cache")
    assert refusal.value.field == "data.sources.1.weight"


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 30_000)
    settings = _settings(tmp_path / "a.txt")
    with file_size_limit(20_000):
        with pytest.raises(WorkError, match="cannot write tokens to .*too large"):
            prepare(settings, BYTES, tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())
    assert prepare(settings, BYTES, tmp_path / "cache").num_labels == 30_000


def test_documents_can_be_tokenized_without_files(tmp_path: Path) -> None:
    documents = [TextDocument(text=text, origin=Origin(path="memory")) for text in ("ab", "c")]
    counts = tokenize_documents(documents, BYTES, tmp_path / "a", "documents")
    assert (counts.documents, counts.tokens, counts.labels) == (2, 5, 3)
    spec = prepare(_settings(tmp_path / "a"), BYTES, tmp_path / "cache")
    assert _text(spec) == b"abc"


def test_a_disk_error_while_tokenizing_is_the_works(tmp_path: Path) -> None:
    with pytest.raises(WorkError, match="cannot write tokens"):
        tokenize_documents([], BYTES, tmp_path / "absent" / "a", "documents")
