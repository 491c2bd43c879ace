"""Checkpoints in Megatron Core's names, exchanged with Megatron Core itself."""

from __future__ import annotations

import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from shoal.errors import ConfigError, WorkError
from shoal.models import (
    Decoder,
    DecoderConfig,
    HFWeights,
    MegatronWeights,
    import_model,
    load_weights,
    parameter_shapes,
    write_megatron_folder,
)
from tests.models.megatron_process import (
    CONTEXT,
    HIDDEN,
    LAYERS,
    MODELS,
    VOCABULARY,
    WIDTH,
    tokens,
)
from tests.models.tiny import TINY

ROOT = Path(__file__).parents[2]


class Drawn:
    """A ``WeightSource`` of random numbers."""

    def __init__(self, config: DecoderConfig) -> None:
        draw = torch.Generator().manual_seed(5)
        self.tensors = {
            name: torch.randn(shape, generator=draw) * 0.2 + 0.1
            for name, shape in parameter_shapes(config).items()
        }

    def shapes(self) -> Mapping[str, torch.Size]:
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self.tensors[name][start:stop]


def hf_config(case: dict[str, Any]) -> dict[str, Any]:
    """The same model in Hugging Face's words."""
    biased = case.get("bias", False)
    kinds: dict[str, dict[str, Any]] = {
        "qkv_bias": {"model_type": "qwen2"},
        "norms": {"model_type": "qwen3"},
    }
    own = next((kinds[key] for key in kinds if case.get(key)), None)
    config: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": case["heads"],
        "num_key_value_heads": case["groups"],
        "head_dim": case["head"],
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": case.get("tied", False),
        **(own or {"model_type": "llama", "attention_bias": biased, "mlp_bias": biased}),
    }
    if "scaling" in case:
        config["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": case["scaling"],
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    return config


def logits(decoder: Decoder) -> torch.Tensor:
    with torch.no_grad():
        found = decoder(tokens()).logits
    assert isinstance(found, torch.Tensor)
    return found


@pytest.fixture(scope="module")
def exchanged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder through which both sides have gone."""
    folder = tmp_path_factory.mktemp("megatron")
    for name, case in MODELS.items():
        config = DecoderConfig.from_hf(hf_config(case))
        write_megatron_folder(folder / name / "ours", config, Drawn(config), dtype=torch.float32)
    command = [sys.executable, "-W", "ignore", "-m", "tests.models.megatron_process", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_megatron_computes_the_same_from_what_we_write(exchanged: Path, name: str) -> None:
    config = DecoderConfig.from_hf(hf_config(MODELS[name]))
    decoder = Decoder(config, torch.float32)
    load_weights(decoder, Drawn(config))
    theirs = torch.load(exchanged / name / "ours.pt")
    torch.testing.assert_close(logits(decoder), theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_we_compute_the_same_from_what_megatron_saves(
    exchanged: Path, tmp_path: Path, name: str
) -> None:
    import_model(str(exchanged / name / "theirs"), tmp_path / "hf")
    weights = HFWeights(tmp_path / "hf")
    expected = DecoderConfig.from_hf(hf_config(MODELS[name]))
    assert weights.config == expected
    decoder = Decoder(weights.config, torch.float32)
    load_weights(decoder, weights)
    theirs = torch.load(exchanged / name / "theirs.pt")
    torch.testing.assert_close(logits(decoder), theirs, rtol=1e-4, atol=1e-4)
    # ... and back again, to the bit
    write_megatron_folder(tmp_path / "again", expected, weights, dtype=torch.float32)
    ours, source = (MegatronWeights(f) for f in (tmp_path / "again", exchanged / name / "theirs"))
    for parameter, shape in ours.shapes().items():
        assert torch.equal(
            ours.rows(parameter, 0, shape[0]), source.rows(parameter, 0, shape[0])
        ), parameter


DENSE = {name: hf for name, hf in TINY.items() if name in ("llama2", "smollm2", "qwen3")}


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_round_trip_keeps_every_bit(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    config = DecoderConfig.from_hf(DENSE[name])
    source = Drawn(config)
    write_megatron_folder(tmp_path / "megatron", config, source, dtype=dtype)
    weights = MegatronWeights(tmp_path / "megatron")
    assert weights.config == config
    for parameter, tensor in source.tensors.items():
        tensor, num_rows = tensor.to(dtype), tensor.shape[0]
        for start, stop in ((0, num_rows), (num_rows // 3, num_rows - 1), (1, 1)):
            rows = weights.rows(parameter, start, stop)
            assert torch.equal(rows.view_as(tensor[start:stop]), tensor[start:stop])
            assert stop == start or rows.dtype == dtype
    import_model(str(tmp_path / "megatron" / "release"), tmp_path / "hf")
    hf = HFWeights(tmp_path / "hf")
    for parameter, tensor in source.tensors.items():
        assert torch.equal(hf.rows(parameter, 0, tensor.shape[0]), tensor.to(dtype))


class _Chunks(DefaultSavePlanner):
    """Saves each tensor in the pieces that two tensor-parallel ranks hold."""

    def create_local_plan(self) -> SavePlan:
        items = []
        for key, tensor in self.state_dict.items():
            # Projections back to the hidden state are split by columns, gate and up rows apart.
            by_columns = "linear_proj" in key or "linear_fc2" in key
            axis = max(tensor.ndim - (1 if by_columns else 2), 0)
            parts = 4 if "linear_fc1.weight" in key else 2
            step = tensor.shape[axis] // parts if tensor.shape[axis] > parts else tensor.shape[axis]
            for start in range(0, tensor.shape[axis], step):
                sizes, offsets = list(tensor.shape), [0] * tensor.ndim
                sizes[axis], offsets[axis] = min(step, sizes[axis] - start), start
                chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
                data = TensorWriteData(chunk, TensorProperties(dtype=tensor.dtype), tensor.size())
                index = MetadataIndex(key, chunk.offsets)
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        assert write_item.tensor_data is not None
        chunk = write_item.tensor_data.chunk
        part: torch.Tensor = self.state_dict[write_item.index.fqn]
        for axis, (start, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
            part = part.narrow(axis, start, size)
        return part.contiguous()


def _stacked(weights: MegatronWeights) -> dict[str, torch.Tensor]:
    """A checkpoint's tensors as they are in the file."""
    folder = weights.companions
    assert folder is not None
    reader = FileSystemReader(folder.parent)
    stored = reader.read_metadata().state_dict_metadata.items()
    tensors = {k: torch.empty(v.size) for k, v in stored if isinstance(v, TensorStorageMetadata)}
    load(tensors, storage_reader=reader, no_dist=True)
    return tensors


@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "layer by layer"])
@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_what_many_ranks_saved_is_read_alike(tmp_path: Path, stacked: bool) -> None:
    config = DecoderConfig.from_hf({**TINY["qwen3"], "num_key_value_heads": 3})
    write_megatron_folder(tmp_path / "one", config, Drawn(config), dtype=torch.float32)
    one = MegatronWeights(tmp_path / "one")
    tensors = _stacked(one)
    if not stacked:
        for key in [key for key in tensors if key.startswith("decoder.layers.")]:
            for layer, part in enumerate(tensors.pop(key)):
                tensors[key.replace("layers.", f"layers.{layer}.")] = part
    many = tmp_path / "many" / "iter_0000003"
    save(
        tensors,
        storage_writer=FileSystemWriter(many),
        planner=_Chunks(flatten_state_dict=False),
        no_dist=True,
    )
    for name in ("metadata.json", "common.pt"):
        shutil.copy(tmp_path / "one" / "release" / name, many)
    shutil.copytree(tmp_path / "one" / "release" / "hf", many / "hf")
    (tmp_path / "many" / "latest_checkpointed_iteration.txt").write_text("3")
    found = MegatronWeights(tmp_path / "many")
    for parameter, shape in one.shapes().items():
        rows = found.rows(parameter, 1, shape[0])
        assert torch.equal(rows, one.rows(parameter, 1, shape[0])), parameter


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("mixtral", "mixtures of experts"),
        ("mistral", "sliding windows"),
        ("llama3", "such llama3 rotary scaling"),
    ],
)
def test_models_that_its_dense_gpt_cannot_be(tmp_path: Path, name: str, problem: str) -> None:
    config = DecoderConfig.from_hf(TINY[name])
    with pytest.raises(ConfigError, match=problem) as caught:
        write_megatron_folder(tmp_path / "out", config, Drawn(config), dtype=torch.float32)
    assert (caught.value.field, caught.value.value) == ("--format", "megatron")
    assert not (tmp_path / "out").exists()


def _written(folder: Path) -> Path:
    """An iteration's folder whose model only ``common.pt`` knows."""
    config = DecoderConfig.from_hf(DENSE["llama2"])
    write_megatron_folder(folder, config, Drawn(config), dtype=torch.float32)
    (folder / "release" / "hf" / "config.json").unlink()
    return folder / "release"


@pytest.mark.parametrize(
    ("argument", "value", "problem"),
    [
        ("normalization", "LayerNorm", "normalization = LayerNorm"),
        ("swiglu", False, "swiglu = False"),
        ("num_experts", 8, "num_experts = 8"),
        ("rotary_percent", 0.5, "rotary_percent = 0.5"),
        ("position_embedding_type", "learned_absolute", "learned_absolute"),
        ("norm_epsilon", None, "lack norm_epsilon"),
        ("ffn_hidden_size", 51, "the model asks for"),
        ("untie_embeddings_and_output_weights", False, "no place for output_layer.weight"),
        ("add_qkv_bias", True, "linear_qkv.bias"),
    ],
)
def test_arguments_that_no_family_can_follow(
    tmp_path: Path, argument: str, value: object, problem: str
) -> None:
    common = _written(tmp_path / "megatron") / "common.pt"
    values = torch.load(common, weights_only=False)
    assert isinstance(values["args"], Namespace)
    setattr(values["args"], argument, value)
    torch.save(values, common)
    with pytest.raises(ConfigError, match=problem) as caught:
        import_model(str(tmp_path / "megatron"), tmp_path / "out")
    assert caught.value.field == "SOURCE" and caught.value.remedy
    assert not (tmp_path / "out").exists()


def test_a_pickle_runs_nothing(tmp_path: Path) -> None:
    release = _written(tmp_path / "megatron")
    torch.save({"args": _Touches(tmp_path / "touched")}, release / "common.pt")
    with pytest.raises(ConfigError, match="says what model it is"):
        import_model(str(release), tmp_path / "out")
    assert not (tmp_path / "touched").exists()


class _Touches:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_other_formats_and_damage(tmp_path: Path) -> None:
    release = _written(tmp_path / "megatron")
    (release / ".metadata").rename(tmp_path / "kept")
    with pytest.raises(WorkError, match="lacks .metadata"):
        MegatronWeights(release)
    (tmp_path / "kept").rename(release / ".metadata")
    content = (release / "__0_0.distcp").read_bytes()
    (release / "__0_0.distcp").write_bytes(content[: len(content) // 2])
    with pytest.raises(WorkError, match="copy it again"):
        import_model(str(release), tmp_path / "out")
    for text in ("{", "[" * 100_000):
        (release / "metadata.json").write_text(text)
        with pytest.raises(WorkError, match=r"metadata\.json is damaged"):
            MegatronWeights(release)
    (release / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    with pytest.raises(ConfigError, match="only torch_dist"):
        MegatronWeights(release)
    (release / "mp_rank_00").mkdir()
    with pytest.raises(ConfigError, match="older format"):
        MegatronWeights(tmp_path / "megatron")
    tracker = tmp_path / "megatron" / "latest_checkpointed_iteration.txt"
    for content in (b"\xff", b"1" * 5000):
        tracker.write_bytes(content)
        with pytest.raises(WorkError, match=r"iteration\.txt is damaged"):
            MegatronWeights(tmp_path / "megatron")
    tracker.write_text("5\n")
    with pytest.raises(ConfigError, match="iter_0000005, which is absent"):
        MegatronWeights(tmp_path / "megatron")
