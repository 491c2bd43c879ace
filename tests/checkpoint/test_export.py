"""A checkpoint becomes a folder that ``transformers`` loads, with the same logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from shoal.checkpoint import CheckpointWeights, export, hf_attachments, save
from shoal.errors import ConfigError, Unavailable, WorkError
from shoal.models import Decoder, DecoderConfig
from shoal.models.weights import load_weights
from tests.checkpoint.plain import local
from tests.training.tiny import MODEL

LLAMA: dict[str, Any] = {**MODEL, "intermediate_size": 40, "rms_norm_eps": 1e-5}
QWEN3_MOE: dict[str, Any] = {
    **LLAMA,
    "model_type": "qwen3_moe",
    "tie_word_embeddings": False,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}


def _saved(folder: Path, hf: dict[str, Any], files: Path | None = None) -> tuple[Decoder, Path]:
    torch.manual_seed(3)
    decoder = Decoder(DecoderConfig.from_hf(hf), torch.float32)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.normal_(std=0.1)
    saved = save(
        folder,
        1,
        model=decoder,
        optimizer=None,
        counters={},
        attachments=hf_attachments(hf, files),
    )
    return decoder, local(saved.path)


@pytest.mark.parametrize("hf", [LLAMA, QWEN3_MOE], ids=lambda hf: hf["model_type"])
def test_transformers_computes_the_same_logits(tmp_path: Path, hf: dict[str, Any]) -> None:
    files = tmp_path / "model"
    files.mkdir()
    (files / "chat_template.jinja").write_text("{{ messages }}")
    (files / "model.safetensors").write_text("not to be carried")
    decoder, path = _saved(tmp_path, hf, files)
    out = tmp_path / "out"
    export(path, out, dtype=torch.float32)
    assert (out / "chat_template.jinja").read_text() == "{{ messages }}"
    tokens = torch.randint(257, (2, 9))
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    theirs.config._experts_implementation = "eager"  # the fast one takes no odd sizes
    with torch.no_grad():
        expected = theirs(tokens).logits
        logits = decoder.eval()(tokens).logits
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


def test_what_is_attached_is_read_at_once_and_named_where_it_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    assert hf_attachments(LLAMA, tmp_path)["hf/tokenizer.json"] == b"{}"
    (tmp_path / "vocab.json").symlink_to("/proc/self/mem")  # a file that no one can read from 0
    with pytest.raises(WorkError, match=r"vocab\.json cannot be read: Input/output error"):
        hf_attachments(LLAMA, tmp_path)


def test_a_file_to_attach_that_is_gone_is_no_fault_of_the_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(WorkError, match="gone cannot be read: No such file"):
        model = torch.nn.Linear(2, 2)
        gone = {"gone": tmp_path / "gone"}
        save(tmp_path / "run", 1, model=model, optimizer=None, counters={}, attachments=gone)


def test_weights_are_read_by_rows(tmp_path: Path) -> None:
    decoder, path = _saved(tmp_path, QWEN3_MOE)
    weights = CheckpointWeights(path)
    assert weights.shapes() == {name: p.shape for name, p in decoder.named_parameters()}
    table = decoder.get_parameter("model.embed_tokens.weight").detach()
    assert torch.equal(weights.rows("model.embed_tokens.weight", 100, 257), table[100:])
    fresh = Decoder(DecoderConfig.from_hf(QWEN3_MOE), torch.float32)
    load_weights(fresh, weights)
    for name, parameter in decoder.named_parameters():
        assert torch.equal(fresh.get_parameter(name), parameter)


def test_what_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    decoder, path = _saved(tmp_path, LLAMA)
    bare = save(tmp_path, 2, model=decoder, optimizer=None, counters={}).path
    with pytest.raises(ConfigError, match="carries no attachments/hf/config.json"):
        export(bare, tmp_path / "out")
    with pytest.raises(ConfigError, match="not an empty folder"):
        export(path, tmp_path)
    shard = path / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-9] + b"123456789")
    with pytest.raises(WorkError, match=r"__0_0\.distcp does not match its checksum"):
        export(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_file_beside_the_weights_that_cannot_be_read_now_may_be_later(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").symlink_to("/proc/self/mem")  # an input/output error at its start
    with pytest.raises(Unavailable, match="tokenizer.json cannot be read: Input/output error"):
        hf_attachments(LLAMA, tmp_path)
