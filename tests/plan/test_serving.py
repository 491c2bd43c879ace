"""A plan of serving against the engine that is then loaded."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.config import ServeConfig, serve_config_from_tree
from shoal.errors import ConfigError
from shoal.inference.forward.sizes import weight_bytes
from shoal.inference.loading import load_engine
from shoal.inference.pool import PROCESS_BYTES
from shoal.inference.refusals import Host
from shoal.models import DecoderConfig
from shoal.ops.fixed import KVCache
from shoal.plan.serving import ServingPlan, plan_serving
from tests.inference.small_models import random_folder
from tests.models.tiny import TINY

HOST = Host(num_cpus=8, free_bytes=2**30)


def _config(folder: Path, **serve: Any) -> ServeConfig:
    return serve_config_from_tree({"model": {"path": str(folder)}, "serve": serve})


def _plan(folder: Path, **serve: Any) -> ServingPlan:
    return plan_serving(_config(folder, **serve), HOST)


def _held(thing: object) -> int:
    """Bytes of the memory behind every tensor that ``thing`` reaches, each place counted once."""
    seen: set[int] = set()
    places: dict[int, int] = {}
    left = [thing]
    while left:
        each = left.pop()
        if id(each) in seen or isinstance(each, type):
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            places[each.data_ptr()] = each.nbytes
        elif isinstance(each, dict | list | tuple) or type(each).__module__.startswith("shoal."):
            left += gc.get_referents(each)
    return sum(places.values())


@pytest.mark.parametrize("precision", ["fp32", "bf16", "mxfp8"])
@pytest.mark.parametrize("model", ["smollm2", "llama3", "qwen3", "qwen2_moe", "qwen3_moe"])
def test_bytes_and_blocks_are_those_of_the_engine(
    model: str, precision: str, tmp_path: Path
) -> None:
    folder = random_folder(TINY[model], tmp_path / "m")
    kv = {"tokens": 1000, "block_tokens": 48}
    made = _plan(folder, precision=precision, kv=kv)
    engine = load_engine(folder, _config(folder, precision=precision, kv=kv).serve)
    cache = engine._runner._cache
    assert made.weight_bytes == _held(engine.model)
    assert made.kv_bytes == _held(cache) == cache.keys.nbytes + cache.values.nbytes
    assert made.limits.num_blocks == cache.num_blocks == 1000 // 48
    assert made.block_bytes == KVCache.block_bytes(
        48, engine.model.config.num_layers, cache.kv_heads, cache.head_dim, cache.dtype
    )
    assert made.token_bytes * 48 == made.block_bytes


def test_torchs_own_products_take_what_their_matrices_do(tmp_path: Path) -> None:
    for model in ("smollm2", "qwen3_moe"):
        folder = random_folder(TINY[model], tmp_path / model)
        kv = {"tokens": 640}
        made = _plan(folder, precision="fp32", batch_invariant=False, kv=kv)
        config = DecoderConfig.from_hf(TINY[model])
        tables = config.max_position_embeddings * config.head_dim * 4
        tied = config.vocab_size * config.hidden_size if config.tie_word_embeddings else 0
        assert made.weight_bytes == 4 * (made.num_parameters + tied) + tables


def test_a_pool_without_a_size_is_the_engines(tmp_path: Path) -> None:
    folder = random_folder(TINY["smollm2"], tmp_path / "m")
    made = _plan(folder, batch={"sequences": 5}, kv={"block_tokens": 16})
    # 64 positions are four blocks for each of five sequences.
    assert made.limits.num_blocks == 20
    assert made.num_longest == 5
    little = Host(num_cpus=8, free_bytes=16 * made.block_bytes)
    with pytest.raises(ConfigError, match=r"serve\.replicas = 1: 1 engines and 1 frontends"):
        plan_serving(_config(folder, kv={"block_tokens": 16}), little)
    # Half of what weights and processes leave, shared by the replicas, where that is less.
    many = {"sequences": 2**14, "tokens": 2**14}
    shared = _plan(folder, batch=many, replicas=2, frontends=1, precision="fp32")
    left = HOST.free_bytes - 2 * shared.weight_bytes - 3 * PROCESS_BYTES
    assert shared.limits.num_blocks == left // 4 // shared.block_bytes
    assert shared.node_bytes < HOST.free_bytes


def test_weights_for_which_there_is_no_room_are_refused(tmp_path: Path) -> None:
    folder = random_folder(TINY["smollm2"], tmp_path / "m")
    needed = _plan(folder, kv={"tokens": 64}).weight_bytes
    for kv in ({}, {"tokens": 64}):
        for replicas, remedy in ((3, r"Use at most 2\."), (1, r"or use a smaller serve\.prec")):
            # Half of an engine is missing.
            free = replicas * (needed + PROCESS_BYTES) + PROCESS_BYTES - needed // 2
            with pytest.raises(ConfigError, match=rf"serve\.replicas = {replicas}: .*{remedy}"):
                config = _config(folder, kv=kv, replicas=replicas, frontends=1)
                plan_serving(config, Host(num_cpus=8, free_bytes=free))


def test_longest_requests_and_what_a_machine_holds(tmp_path: Path) -> None:
    folder = random_folder(TINY["smollm2"], tmp_path / "m")
    kv = {"tokens": 16 * 11, "block_tokens": 16}
    made = _plan(folder, kv=kv, replicas=2, frontends=1, threads=3)
    assert made.num_longest == 11 // 4
    values = made.as_dict()
    assert (values["cpus"], values["replicas"], values["frontends"], values["threads"]) == (
        *(7, 2, 1, 3),
    )
    assert values["node"]["bytes"] == (
        2 * (values["engine"]["weight_bytes"] + values["engine"]["kv_bytes"]) + 3 * PROCESS_BYTES
    )
    assert json.loads(json.dumps(values)) == values
    assert _plan(folder, kv={"tokens": 48, "block_tokens": 16}).num_longest == 0


def test_large_models_are_planned_without_their_memory() -> None:
    config = DecoderConfig.from_hf(
        {
            "model_type": "qwen3_moe",
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "moe_intermediate_size": 1536,
            "num_hidden_layers": 94,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "max_position_embeddings": 40960,
        }
    )
    bf16, mxfp8 = weight_bytes(config, "bf16"), weight_bytes(config, "mxfp8")
    assert 470e9 < bf16 < 472e9  # 235 billion parameters
    assert 0.51 < mxfp8 / bf16 < 0.53


@pytest.mark.parametrize(
    ("serve", "refusal"),
    [
        ({"threads": 9}, r"serve\.threads = 9: this machine has 8 CPUs\. Use at most 8\."),
        ({"frontends": 32}, r"serve\.frontends = 32: .* Use 4 at most"),
        ({"kv": {"tokens": 10**9}}, r"serve\.kv\.tokens = 1000000000: they take .* Use at most"),
        ({"batch": {"tokens": 8}}, r"serve\.batch\.tokens = 8: a step holds at least one token"),
        (
            {"batch_invariant": False, "precision": "mxfp8"},
            r"serve\.batch_invariant = False: MXFP8 weights have kernels of fixed order only",
        ),
    ],
)
def test_what_serving_refuses(serve: dict[str, Any], refusal: str, tmp_path: Path) -> None:
    folder = random_folder(TINY["smollm2"], tmp_path / "m")
    with pytest.raises(ConfigError, match=refusal):
        _plan(folder, **serve)


def test_nothing_is_asked_of_this_machine_where_a_cluster_serves(tmp_path: Path) -> None:
    folder = random_folder(TINY["smollm2"], tmp_path / "m")
    made = plan_serving(_config(folder, threads=1024, kv={"tokens": 640}), None)
    assert made.as_dict()["node"]["free_bytes"] is None
    # So many would find no room here; each engine sizes its pool where it is.
    large = {**TINY["smollm2"], "max_position_embeddings": 1000}
    most = plan_serving(_config(random_folder(large, tmp_path / "large"), replicas=1024), None)
    assert most.limits.num_blocks == 16 * 32
