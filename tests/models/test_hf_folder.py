"""Folders of Hugging Face weights: read by slices, written for ``transformers``, loss-free."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shoal.errors import ConfigError, WorkError
from shoal.models import (
    Decoder,
    DecoderConfig,
    ExpertLayout,
    HFWeights,
    import_model,
    load_weights,
    whole_tensors,
    write_hf_folder,
)
from tests.models.oracle import reference
from tests.models.tiny import TINY


def saved(name: str, folder: Path, **options: Any) -> Any:
    """A random model of ``transformers`` and its folder."""
    model = reference(TINY[name])
    model.save_pretrained(folder, **options)
    return model


def logits_of(folder: Path) -> torch.Tensor:
    """What ``transformers`` computes from a folder."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", experts_implementation="eager"
    )
    logits: torch.Tensor = model.eval()(torch.arange(40).view(2, 20)).logits
    return logits.detach()


def fuse(folder: Path, model: Any) -> None:
    """Rewrite the weights with the tensors of a layer's experts in one, as they are computed."""
    tensors = {name: value.clone() for name, value in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("name", TINY)
def test_import_and_export_lose_nothing(name: str, tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    model = saved(name, source)
    weights = HFWeights(source)
    decoder = Decoder(weights.config, torch.float32)
    load_weights(decoder, weights)
    state = model.state_dict()
    for parameter_name, parameter in decoder.named_parameters():
        assert torch.equal(parameter, state[parameter_name].reshape(parameter.shape))
    for buffer_name, buffer in decoder.named_buffers():
        assert torch.equal(buffer, state[buffer_name])
    tensors = ((n, t.detach()) for n, t in decoder.state_dict(keep_vars=True).items())
    tied = weights.config.tie_word_embeddings
    kept = ((n, t) for n, t in tensors if not (tied and n == "lm_head.weight"))
    write_hf_folder(out, weights.config, kept, max_shard_bytes=50_000)
    assert len(list(out.glob("model-*-of-*.safetensors"))) > 1
    before, after = logits_of(source), logits_of(out)
    assert torch.equal(before, after)
    ours = decoder(torch.arange(40).view(2, 20)).logits
    assert ours is not None
    torch.testing.assert_close(ours, after, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "dots1"])
def test_fused_and_separate_experts_are_the_same_model(name: str, tmp_path: Path) -> None:
    source, fused, separate = (tmp_path / part for part in ("source", "fused", "separate"))
    model = saved(name, source)
    assert HFWeights(source).layout is ExpertLayout.SEPARATE
    fuse(source, model)
    weights = HFWeights(source)
    assert weights.layout is ExpertLayout.FUSED
    import_model(str(source), separate, expert_layout=ExpertLayout.SEPARATE)
    import_model(str(separate), fused, expert_layout=ExpertLayout.FUSED)
    again = load_file(fused / "model.safetensors")
    for tensor_name, tensor in load_file(source / "model.safetensors").items():
        assert torch.equal(again[tensor_name], tensor)
    names = set(load_file(separate / "model.safetensors"))
    expected = {
        "mixtral": "model.layers.1.block_sparse_moe.experts.4.w3.weight",
        "qwen2_moe": "model.layers.2.mlp.experts.4.up_proj.weight",
        "dots1": "model.layers.2.mlp.experts.6.up_proj.weight",
    }.get(name, "model.layers.1.mlp.experts.3.down_proj.weight")
    assert expected in names
    assert torch.equal(logits_of(separate), logits_of(source))


@pytest.mark.parametrize("name", ["smollm2", "mixtral", "qwen3_moe"])
@pytest.mark.parametrize("fused", [False, True])
def test_any_rows_are_the_same_as_those_of_the_whole(
    name: str, fused: bool, tmp_path: Path
) -> None:
    model = saved(name, tmp_path, max_shard_size="50KB")
    if fused:
        (tmp_path / "model.safetensors.index.json").unlink(missing_ok=True)
        fuse(tmp_path, model)
    weights = HFWeights(tmp_path)
    chance = random.Random(1)
    for parameter, whole in whole_tensors(weights):
        assert whole.shape == weights.shapes()[parameter]
        for _ in range(8):
            start = chance.randrange(whole.shape[0] + 1)
            stop = chance.randrange(start, whole.shape[0] + 1)
            assert torch.equal(weights.rows(parameter, start, stop), whole[start:stop])


def change(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace (or with None remove) tensors of the single file."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, value in changes.items():
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value
    save_file(tensors, path, metadata={"format": "pt"})


def configure(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model.norm.weight": None}, "model.norm.weight: the folder has no such tensor"),
        ({"model.layers.2.mlp.x": torch.ones(2)}, "model.layers.2.mlp.x: the config asks"),
        ({"model.norm.weight": torch.ones(65)}, r"model.norm.weight: its shape is \(65,\)"),
        ({"model.norm.weight": torch.ones(66).to(torch.float8_e4m3fn)}, "its format is F8_E4M3"),
        ({"lm_head.weight": torch.ones(257, 66)}, "lm_head.weight: the config calls"),
        ({"lm_head.weight": torch.ones(2, 66)}, "lm_head.weight: the config calls"),
    ],
)
def test_weights_that_do_not_fit_are_named(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    saved("smollm2", tmp_path)
    change(tmp_path, **changes)
    with pytest.raises(ConfigError, match=words):
        HFWeights(tmp_path)


def test_a_head_equal_to_the_embedding_is_tied_and_another_can_be_kept(tmp_path: Path) -> None:
    model = saved("smollm2", tmp_path)
    table = model.model.embed_tokens.weight.detach()
    change(tmp_path, **{"lm_head.weight": table.clone()})
    assert "lm_head.weight" not in HFWeights(tmp_path).shapes()
    configure(tmp_path, tie_word_embeddings=False)
    change(tmp_path, **{"lm_head.weight": table + 1})
    weights = HFWeights(tmp_path)
    assert torch.equal(weights.rows("lm_head.weight", 0, 257), table + 1)
    change(tmp_path, **{"lm_head.weight": None})
    with pytest.raises(ConfigError, match="Set tie_word_embeddings to true"):
        HFWeights(tmp_path)


def test_constants_of_old_files_are_passed_over(tmp_path: Path) -> None:
    saved("smollm2", tmp_path)
    change(tmp_path, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(11)})
    HFWeights(tmp_path)


def test_whoever_serves_the_folder_can_read_it(tmp_path: Path) -> None:
    saved("smollm2", tmp_path / "in")
    weights = HFWeights(tmp_path / "in")
    write_hf_folder(tmp_path / "out", weights.config, whole_tensors(weights))
    modes = {path.name: path.stat().st_mode & 0o444 for path in (tmp_path / "out").iterdir()}
    assert set(modes.values()) == {0o444}, modes


def test_folders_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no config.json"):
        HFWeights(tmp_path)
    saved("smollm2", tmp_path, max_shard_size="50KB")
    shard = sorted(tmp_path.glob("model-*"))[1]
    content = shard.read_bytes()
    shard.write_bytes(content[: len(content) // 2])
    with pytest.raises(WorkError, match=shard.name):
        HFWeights(tmp_path)
    shard.unlink()
    with pytest.raises(ConfigError, match="absent"):
        HFWeights(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    for wrong in ("1", "null"):
        index.write_text(f'{{"weight_map": {{"a": {wrong}, "b": "x"}}}}')
        with pytest.raises(ConfigError, match="names a file that is no text"):
            HFWeights(tmp_path)
    index.unlink()
    with pytest.raises(ConfigError, match=r"neither model.safetensors nor"):
        HFWeights(tmp_path)
    for text in (b"{", b'{"hidden_size": "\xe9"}', b'{"hidden_size": ' + b"1" * 5000 + b"}"):
        (tmp_path / "config.json").write_bytes(text)
        with pytest.raises(ConfigError, match="not valid JSON"):
            HFWeights(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="nested too deeply"):
        HFWeights(tmp_path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigError, match=r"config\.json': it is a folder"):
        HFWeights(tmp_path)


def weights_of(hf: dict[str, Any]) -> tuple[DecoderConfig, dict[str, torch.Tensor]]:
    config = DecoderConfig.from_hf(hf)
    torch.manual_seed(2)
    decoder = Decoder(config, torch.float32)
    return config, {n: torch.randn_like(p) for n, p in decoder.named_parameters()}


def test_the_dtype_of_an_export_is_chosen_and_told(tmp_path: Path) -> None:
    config, tensors = weights_of(TINY["smollm2"])
    write_hf_folder(tmp_path / "half", config, tensors.items(), dtype=torch.bfloat16)
    half = load_file(tmp_path / "half" / "model.safetensors")
    assert half.keys() == tensors.keys()
    assert all(torch.equal(half[n], t.bfloat16()) for n, t in tensors.items())
    written = json.loads((tmp_path / "half" / "config.json").read_text())
    assert written["dtype"] == "bfloat16"
    assert written["architectures"] == ["LlamaForCausalLM"]
    with pytest.raises(ConfigError, match="dtype"):
        write_hf_folder(tmp_path / "whole", config, tensors.items(), dtype=torch.int8)


def test_an_export_that_is_not_whole_leaves_nothing(tmp_path: Path) -> None:
    config, tensors = weights_of(TINY["smollm2"])
    items = list(tensors.items())
    for bad, words in (
        (items[:-1], "never came"),
        ([*items, items[0]], "came twice"),
        ([*items, ("lm_head.weight", items[0][1])], "lm_head.weight is not a parameter"),
        ([(items[0][0], items[0][1][1:]), *items[1:]], "has the shape"),
        ([(items[0][0], items[0][1].int()), *items[1:]], "no float"),
    ):
        with pytest.raises(WorkError, match=words):
            write_hf_folder(tmp_path / "out", config, bad)
        assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_left_alone(tmp_path: Path) -> None:
    config, tensors = weights_of(TINY["smollm2"])
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(ConfigError, match="OUT"):
        write_hf_folder(tmp_path, config, tensors.items())
    assert (tmp_path / "mine").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    write_hf_folder(tmp_path / "empty", config, tensors.items())
    assert (tmp_path / "empty" / "model.safetensors").exists()


_FULL_DISK = """
import resource, sys
from pathlib import Path
from shoal.errors import WorkError
from shoal.models import import_model
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    import_model(sys.argv[1], Path(sys.argv[2]))
except WorkError as error:
    print("refused:", error)
"""


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    saved("smollm2", source)
    result = subprocess.run(
        [sys.executable, "-c", _FULL_DISK, str(source), str(out)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert "refused:" in result.stdout and str(out.name) in result.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_tokenizer_and_templates_go_along(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    saved("smollm2", source)
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        (source / name).write_text(json.dumps(name))
    (source / "notes.txt").write_text("not of the model")
    import_model(str(source), out)
    assert {path.name for path in out.iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
        "generation_config.json",
    }
    assert json.loads((out / "tokenizer.json").read_text()) == "tokenizer.json"


@pytest.fixture(autouse=True)
def _quiet_saving() -> Any:
    """``save_pretrained`` warns about files that it closes late."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        yield
