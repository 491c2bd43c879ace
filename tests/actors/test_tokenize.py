"""Tokenization as Ray Data tasks against the plain loop."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.config import DataSettings, SourceSettings
from shoal.data import load_tokenizer, prepare
from shoal.errors import ConfigError
from shoal_actors.data import RayDataRunner
from shoal_actors.driver import Cluster
from tests.data.tiny import CHAT, write_tokenizer

SHARD_BYTES = 200


def _settings(path: Path) -> DataSettings:
    return DataSettings(sources=(SourceSettings(path=str(path)),), seq_len=16)


def _contents(cache: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in cache.rglob("*") if path.is_file()}


def test_ray_data_writes_the_bytes_of_the_plain_loop(
    tmp_path: Path, ray_session: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = [json.dumps({"text": f"row number {number} " * 5}) for number in range(12)]
    rows[7] = json.dumps({"messages": CHAT})
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    settings = _settings(tmp_path / "rows.jsonl")
    tokenizer = load_tokenizer(str(write_tokenizer(tmp_path / "bpe")))
    local = prepare(settings, tokenizer, tmp_path / "local", shard_bytes=SHARD_BYTES)
    capfd.readouterr()
    remote = prepare(
        settings,
        tokenizer,
        tmp_path / "remote",
        run_shards=RayDataRunner(workers=2),
        shard_bytes=SHARD_BYTES,
    )
    assert capfd.readouterr() == ("", "")  # nothing of Ray's reaches the terminal
    assert _contents(tmp_path / "remote") == _contents(tmp_path / "local")
    assert remote.fingerprint == local.fingerprint
    assert "tokens_mask.bin" in _contents(tmp_path / "remote")


def test_the_first_mistake_is_raised_as_it_is(tmp_path: Path, ray_session: Cluster) -> None:
    rows = [json.dumps({"text": f"row number {number} " * 5}) for number in range(12)]
    rows[5] = rows[9] = '{"txt": "no text"}'
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    with pytest.raises(ConfigError, match="line 6 has neither") as refusal:
        prepare(
            _settings(tmp_path / "rows.jsonl"),
            load_tokenizer("bytes"),
            tmp_path / "cache",
            run_shards=RayDataRunner(workers=2),
            shard_bytes=SHARD_BYTES,
        )
    assert refusal.value.field == "data.sources.0.text_key"
    assert not list((tmp_path / "cache").iterdir())
