"""Every rule that refuses a run, one row each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.checkpoint import save
from shoal.config import Config
from shoal.errors import ConfigError, ConfigErrors
from shoal.models import DecoderConfig, parameter_shapes, write_hf_folder
from shoal.plan.machine import Machine
from shoal.plan.refusals import check
from tests.plan.configs import DENSE, EXPERTS, config

BARE = Machine(has_cuda=False, cpu_has_bf16=False)
GPUS = Machine(has_cuda=True, cpu_has_bf16=True)


def _refusal(settings: Config, machine: Machine = BARE) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        check(settings, machine)
    assert not isinstance(caught.value, ConfigErrors), f"more than one refusal:\n{caught.value}"
    return caught.value


ROWS: list[tuple[dict[str, Any], str, object, str, str]] = [
    # sections, field, value, a word of the problem, a word of the remedy
    ({"parallel": {"tensor": 2}}, "parallel.tensor", 2, "shards whole rows", "Set it to 1"),
    (
        {"parallel": {"expert_tensor": 4}},
        "parallel.expert_tensor",
        4,
        "small products",
        "sharding.*.inner = parameters",
    ),
    (
        {"cluster": {"workers": 3}, "parallel": {"pipeline": 3}},
        "parallel.pipeline",
        3,
        "2 layers are fewer than the stages",
        "Use at most 2",
    ),
    (
        {"cluster": {"workers": 2}, "parallel": {"pipeline": 2, "virtual_stages": 2}},
        "parallel.virtual_stages",
        2,
        "2 stages of 2 runs of layers are more runs than the model's 2 layers",
        "Use at most 1",
    ),
    (
        {"parallel": {"virtual_stages": 2}},
        "parallel.virtual_stages",
        2,
        "nothing to interleave",
        "parallel.pipeline to 2 or more",
    ),
    (
        {"cluster": {"workers": 4, "nvlink_domain": 2}, "parallel": {"context": 4}},
        "parallel.context",
        4,
        "2 ranks of one stage share fast links",
        "larger cluster.nvlink_domain",
    ),
    (
        {"cluster": {"workers": 8}, "parallel": {"context": 8}, "data": {"seq_len": 15}},
        "data.seq_len",
        15,
        "cut into 16 chunks, two for each of 8 context ranks",
        "at least 16",
    ),
    (
        {
            "cluster": {"workers": 2},
            "parallel": {"context": 2},
            "model": {"config": {**DENSE, "attention_dropout": 0.1}},
        },
        "model.config.attention_dropout",
        0.1,
        "would depend on the number of ranks",
        "parallel.context to 1",
    ),
    (
        {"optimizer": {"expert_bias_rate": 0.001}},
        "optimizer.expert_bias_rate",
        0.001,
        "no bias takes part in choosing experts of this llama model",
        "Leave it out",
    ),
    (
        {"optimizer": {"expert_bias_rate": 0.001}, "model": {"config": EXPERTS}},
        "optimizer.expert_bias_rate",
        0.001,
        "no bias takes part in choosing experts of this qwen3_moe model",
        "router_aux_loss_coef balances by a loss",
    ),
    (
        {"cluster": {"workers": 2}, "parallel": {"expert": 2}},
        "parallel.expert",
        2,
        "no layer of this llama model has experts",
        "Set it to 1",
    ),
    (
        {
            "model": {"config": {**EXPERTS, "num_experts": 6}},
            "cluster": {"workers": 4},
            "parallel": {"expert": 4},
        },
        "parallel.expert",
        4,
        "6 experts do not divide into 4 equal parts",
        "Use 1 or one of 2, 3, 6",
    ),
    (
        {
            "model": {"config": {**EXPERTS, "num_experts": 6}},
            "cluster": {"workers": 4, "nvlink_domain": 2},
            "parallel": {"expert": 3},
        },
        "parallel.expert",
        3,
        "would reach across them",
        "divisor of 2",
    ),
    (
        {"cluster": {"workers": 6, "nvlink_domain": 4}},
        "cluster.nvlink_domain",
        4,
        "6 workers do not fill domains of 4",
        "divisor of 6",
    ),
    (
        {"sharding": {"dense": {"outer": "parameters", "inner": "gradients"}}},
        "sharding.dense.outer",
        "parameters",
        "the outer axis cannot shard more",
        "lower outer",
    ),
    (
        {"sharding": {"expert": {"outer": "optimizer", "inner": "replicate"}}},
        "sharding.expert.outer",
        "optimizer",
        "the outer axis cannot shard more",
        "Raise inner",
    ),
    (
        {"cluster": {"workers": 2}, "train": {"global_batch": 9, "micro_batch": 2, "steps": 1}},
        "train.global_batch",
        9,
        "microbatches of 2 on 2 data-parallel ranks",
        "8 or 12",
    ),
    (
        {"cluster": {"workers": 2}, "train": {"global_batch": 1, "steps": 1}},
        "train.global_batch",
        1,
        "does not divide",
        "such as 2",
    ),
    ({"data": {"seq_len": 65}}, "data.seq_len", 65, "positions up to 64", "at most 64"),
    ({"cluster": {"device": "cuda"}}, "cluster.device", "cuda", "no CUDA device", "Use cpu"),
    ({"train": {"cuda_graph": True, "steps": 1}}, "train.cuda_graph", True, "on a CPU", "false"),
    (
        {"precision": {"compute": "bf16", "parameter_gather": "mxfp8"}},
        "precision.parameter_gather",
        "mxfp8",
        "only weights that multiply in MXFP8",
        "precision.compute to mxfp8",
    ),
    (
        {"precision": {"compute": "mxfp8", "keep_bf16": ["*.mlp", "*.attention"]}},
        "precision.keep_bf16",
        "*.attention",
        "no linear or expert layer of this model",
        "model.layers.0.self_attn.q_proj.weight",
    ),
    (
        {"precision": {"compute": "mxfp8", "first_last_layers_bf16": True}},
        "precision.compute",
        "mxfp8",
        "all 14 matrices of the model are kept in bf16",
        "Keep fewer",
    ),
    (
        {"precision": {"compute": "mxfp8"}},
        "precision.compute",
        "mxfp8",
        "model.layers.0.self_attn.q_proj.weight is of 66 x 66; 14 of the 14",
        "Set precision.parameter_gather to bf16",
    ),
    (
        {"precision": {"compute": "mxfp8", "parameter_gather": "mxfp8"}},
        "precision.parameter_gather",
        "mxfp8",
        "weights travel in it too, in blocks of 32 rows and columns",
        "Set precision.parameter_gather to bf16",
    ),
    (
        {"precision": {"compute": "fp32", "parameter_gather": "bf16"}},
        "precision.parameter_gather",
        "bf16",
        "which is fp32",
        "Leave it out",
    ),
    (
        {"optimizer": {"kind": "sgd"}, "precision": {"compute": "fp32", "moments": "bf16"}},
        "precision.moments",
        "bf16",
        "format of the main weights",
        "Leave it out",
    ),
    (
        {"checkpoint": {"resume": "runs/none/step-00000001"}},
        "checkpoint.resume",
        "runs/none/step-00000001",
        "no such folder",
        "Give the folder of a complete step",
    ),
    (
        {"model": {"config": {**DENSE, "vocab_size": 256}}},
        "data.tokenizer",
        "bytes",
        "257 tokens",
        "model's own tokenizer",
    ),
    (
        {"data": {"tokenizer": "no/such/tokenizer"}},
        "data.tokenizer",
        "no/such/tokenizer",
        "no such folder",
        "Give 'bytes'",
    ),
    (
        {"data": {"sources": [{"path": "no/such/corpus"}]}},
        "data.sources.0.path",
        "no/such/corpus",
        "no such file or folder",
        "Check the path",
    ),
    (
        {"data": {"sources": [{"path": "no/such/pair", "format": "megatron"}]}},
        "data.sources.0.path",
        "no/such/pair",
        "no/such/pair.idx",
        "Give the common prefix",
    ),
    (
        {"model": {"config": {**DENSE, "num_hidden_layers": 10**6}}},
        "model.config.num_hidden_layers",
        10**6,
        "at most 4,096",
        "smaller number",
    ),
    (
        {"model": {"config": {**DENSE, "hidden_size": 10**9}}},
        "model.config.hidden_size",
        10**9,
        "at most 1,048,576",
        "smaller number",
    ),
    (
        {"model": {"config": {**DENSE, "model_type": "gpt2"}}},
        "model.config.model_type",
        "gpt2",
        "not supported",
        "Take one of",
    ),
    (
        {"model": {"config": None, "path": "no/such/folder"}},
        "model.path",
        "no/such/folder",
        "no such folder",
        "shoal import",
    ),
]


@pytest.mark.parametrize(
    ("sections", "field", "value", "problem", "remedy"),
    ROWS,
    ids=[f"{row[1]}={row[2]}" for row in ROWS],
)
def test_a_rule_refuses(
    sections: dict[str, Any], field: str, value: object, problem: str, remedy: str
) -> None:
    refusal = _refusal(config(**sections))
    assert (refusal.field, refusal.value) == (field, value)
    assert problem in refusal.problem
    assert remedy in refusal.remedy


def test_only_a_complete_checkpoint_can_be_resumed(tmp_path: Path) -> None:
    refusal = _refusal(config(checkpoint={"resume": str(tmp_path)}))
    assert refusal.field == "checkpoint.resume"
    assert "no complete checkpoint" in refusal.problem and "manifest.json" in refusal.problem
    saved = save(tmp_path, 1, model=torch.nn.Linear(2, 2), optimizer=None, counters={})
    check(config(checkpoint={"resume": str(saved.path)}), BARE)


def test_mxfp8_is_refused_on_cuda() -> None:
    precision = {"compute": "mxfp8", "parameter_gather": "bf16"}
    refusal = _refusal(config(precision=precision, cluster={"device": "cuda"}), GPUS)
    assert (refusal.field, refusal.value) == ("precision.compute", "mxfp8")
    assert "emulation on CPUs" in refusal.problem and refusal.remedy == "Use bf16"


def test_a_graph_is_refused_on_cuda_too() -> None:
    settings = config(cluster={"device": "cuda"}, train={"cuda_graph": True})
    assert "not built in this version" in _refusal(settings, GPUS).problem


@pytest.mark.parametrize(
    ("text", "problem"),
    [(None, "no config.json"), ("{", "not valid JSON"), ("[]", "not a JSON object")],
)
def test_model_folders_without_a_config(tmp_path: Path, text: str | None, problem: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    refusal = _refusal(config(model={"config": None, "path": str(tmp_path)}))
    assert refusal.field == "model.path"
    assert problem in refusal.problem


def _write_model(folder: Path) -> None:
    decoder = DecoderConfig.from_hf(DENSE)
    tensors = {name: torch.zeros(shape) for name, shape in parameter_shapes(decoder).items()}
    write_hf_folder(folder, decoder, tensors.items())


def test_folders_whose_weights_do_not_fit_their_config(tmp_path: Path) -> None:
    _write_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    refusal = _refusal(config(model={"config": None, "path": str(tmp_path)}))
    assert refusal.field == "model.path"


def test_overrides_are_part_of_the_model(tmp_path: Path) -> None:
    _write_model(tmp_path)
    settings = config(model={"config": None, "path": str(tmp_path)}, data={"seq_len": 128})
    assert _refusal(settings).field == "data.seq_len"
    longer = {"config": None, "path": str(tmp_path), "overrides": {"max_position_embeddings": 128}}
    decoder, _ = check(config(model=longer, data={"seq_len": 128}), BARE)
    assert decoder.max_position_embeddings == 128


def test_every_source_is_looked_at() -> None:
    sources = [{"path": __file__, "weight": 1.0}, {"path": "a"}, {"path": "b", "weight": 1.0}]
    with pytest.raises(ConfigErrors) as caught:
        check(config(data={"sources": sources}), BARE)
    assert [problem.field for problem in caught.value.problems] == [
        "data.sources.1.weight",
        "data.sources.1.path",
        "data.sources.2.path",
    ]


def test_everything_is_said_at_once() -> None:
    settings = config(
        parallel={"tensor": 2, "pipeline": 3},
        optimizer={"kind": "sgd"},
        precision={"compute": "fp32", "moments": "bf16"},
        data={"seq_len": 100},
    )
    with pytest.raises(ConfigErrors) as caught:
        check(settings, BARE)
    fields = [problem.field for problem in caught.value.problems]
    assert fields == [
        "cluster.workers",
        "parallel.tensor",
        "parallel.pipeline",
        "data.seq_len",
        "precision.moments",
    ]
