"""What cannot work is refused by ``shoal plan`` and, before Ray starts, by ``shoal train``.

``FOREIGN`` goes through what Megatron-FSDP v2 refuses (its adapter, its optimizer, its arguments):
what stands for the same here is refused too, or trained by a cell of the composition matrix.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from tests.parallel.matrix import Cell
from tests.parallel.test_matrix import CELLS
from tests.plan.configs import DENSE, EXPERTS, tree
from tests.plan.test_refusals import ROWS

ROOT = Path(__file__).parents[2]
Sections = dict[str, dict[str, Any]]


class Refusal(NamedTuple):
    """One file, and what is said of it."""

    sections: Sections
    field: str
    value: object
    remedy: str


def _wide(**degrees: int) -> Sections:
    """Eight ranks in two domains, with experts."""
    return {
        "model": {"config": {**EXPERTS, "num_experts": 8, "num_hidden_layers": 8}},
        "cluster": {"workers": 8, "nvlink_domain": 4},
        "parallel": degrees,
    }


OURS = [
    *(Refusal(sections, field, value, remedy) for sections, field, value, _, remedy in ROWS),
    # degrees that do not fit together
    Refusal(_wide(pipeline=3), "cluster.workers", 8, "multiple of 3"),
    Refusal(_wide(pipeline=0), "parallel.pipeline", 0, "1"),
    Refusal(_wide(context=-2), "parallel.context", -2, "1"),
    Refusal(_wide(expert=True), "parallel.expert", True, "integer"),
    Refusal(_wide(context=3), "parallel.context", 3, "divisor of 4"),
    Refusal(_wide(context=8), "parallel.context", 8, "larger cluster.nvlink_domain"),
    Refusal(_wide(expert=8), "parallel.expert", 8, "larger cluster.nvlink_domain"),
    Refusal(_wide(pipeline=4, context=4), "parallel.context", 4, "divisor of 2"),
    Refusal(_wide(pipeline=8, expert=2), "parallel.expert", 2, "divisor of 1"),
    Refusal(_wide(pipeline=2, virtual_stages=5), "parallel.virtual_stages", 5, "at most 4"),
    Refusal({"cluster": {"workers": 4, "nvlink_domain": 8}}, "cluster.nvlink_domain", 8, "of 4"),
    Refusal(
        {"cluster": {"workers": 6, "nvlink_domain": 2}, "parallel": {"pipeline": 2}},
        "cluster.nvlink_domain",
        2,
        "divide a stage or hold whole stages",
    ),
    Refusal(
        {**_wide(pipeline=2, context=2), "train": {"steps": 1, "global_batch": 3}},
        "train.global_batch",
        3,
        "2 or 4",
    ),
    # levels
    *(
        Refusal(
            {"sharding": {kind: {"outer": outer, "inner": inner}}},
            f"sharding.{kind}.outer",
            outer,
            "",
        )
        for kind in ("dense", "expert")
        for outer, inner in (
            ("optimizer", "replicate"),
            ("gradients", "replicate"),
            ("parameters", "replicate"),
            ("gradients", "optimizer"),
            ("parameters", "optimizer"),
            ("parameters", "gradients"),
        )
    ),
    Refusal({"sharding": {"dense": {"inner": "zero3"}}}, "sharding.dense.inner", "zero3", ""),
    Refusal({"sharding": {"experts": {"inner": "gradients"}}}, "sharding.experts", None, "expert"),
    # formats and optimizers that do not go together
    Refusal({"precision": {"compute": "fp16"}}, "precision.compute", "fp16", "bf16"),
    Refusal({"precision": {"main_weights": "fp16"}}, "precision.main_weights", "fp16", "bf16"),
    Refusal({"precision": {"moments": "fp8"}}, "precision.moments", "fp8", "bf16"),
    Refusal({"precision": {"rounding": "stochastic"}}, "precision.rounding", "stochastic", "bf16"),
    Refusal({"precision": {"keep_bf16": ["*"]}}, "precision.keep_bf16", ["*"], "mxfp8"),
    Refusal({"optimizer": {"kind": "adam"}}, "optimizer.kind", "adam", "adamw"),
    Refusal({"optimizer": {"momentum": 0.9}}, "optimizer.momentum", 0.9, "sgd"),
    Refusal({"optimizer": {"kind": "sgd", "eps": 1e-6}}, "optimizer.eps", 1e-6, "adamw"),
    Refusal({"optimizer": {"clip": 0.0}}, "optimizer.clip", 0.0, "0"),
    # models
    Refusal(
        {"model": {"config": {**DENSE, "num_key_value_heads": 2}}},
        "model.config.num_key_value_heads",
        2,
        "Take a divisor",
    ),
    Refusal(
        {"model": {"config": {**EXPERTS, "num_experts_per_tok": 6}}},
        "model.config.num_experts_per_tok",
        6,
        "Take fewer",
    ),
    Refusal({"model": {"path": "a", "config": DENSE}}, "model.path", "a", "Keep model.path"),
]

FOREIGN: dict[str, Refusal | Callable[[Cell], bool]] = {
    # the adapter
    "tensor parallelism": Refusal({"parallel": {"tensor": 2}}, "parallel.tensor", 2, "1"),
    "pipeline parallelism": lambda cell: cell.pipeline > 1,
    "context parallelism": lambda cell: cell.context > 1,
    "experts shared by ranks that have none": Refusal(
        {"cluster": {"workers": 2}, "parallel": {"expert": 2}}, "parallel.expert", 2, "1"
    ),
    "experts shared by more ranks than there are": Refusal(
        {"cluster": {"workers": 2}, "model": {"config": EXPERTS}, "parallel": {"expert": 5}},
        "parallel.expert",
        5,
        "divisor of 2",
    ),
    "expert tensor parallelism, unchecked there": Refusal(
        {"parallel": {"expert_tensor": 2}}, "parallel.expert_tensor", 2, "1"
    ),
    "levels other than ZeRO-3": lambda cell: cell.dense in ("RR", "RO", "RG", "OO", "GG"),
    "sharding across domains": lambda cell: cell.dense in ("OO", "OG", "OP", "GG", "GP", "PP"),
    "losses counted by token": lambda cell: cell.num_sequences > 1,  # as everywhere here
    "weights that start from one rank's": lambda cell: cell.ranks > 1,  # as everywhere here
    "8-bit formats of other kinds": Refusal(
        {"precision": {"compute": "fp8"}}, "precision.compute", "fp8", "mxfp8"
    ),
    "4-bit formats": Refusal(
        {"precision": {"parameter_gather": "nvfp4"}}, "precision.parameter_gather", "nvfp4", ""
    ),
    "CUDA graphs where they cannot be": Refusal(
        {"train": {"cuda_graph": True, "steps": 1}}, "train.cuda_graph", True, "false"
    ),
    # switches of theirs, of which nothing here parses any
    **{
        name: Refusal({section: {name: True}}, f"{section}.{name}", True, "")
        for section, name in (
            ("train", "gradient_accumulation_fusion"),
            ("train", "delay_wgrad_compute"),
            ("sharding", "disable_bucketing"),
            ("sharding", "num_buckets"),
            ("sharding", "suggested_communication_unit_size"),
            ("sharding", "nccl_ub"),
            ("sharding", "manual_registration"),
            ("sharding", "double_buffer"),
            ("optimizer", "decoupled_grad"),
            ("optimizer", "loss_scale"),
            ("optimizer", "overlap_param_gather_with_step"),
            ("optimizer", "cpu_offload"),
            ("optimizer", "layer_wise"),
            ("checkpoint", "format"),
        )
    },
    # the optimizer and the arguments
    "several chunks of a model": lambda cell: cell.virtual > 1,
    "fp16": Refusal({"precision": {"compute": "fp16"}}, "precision.compute", "fp16", "bf16"),
    "other optimizers": Refusal({"optimizer": {"kind": "lion"}}, "optimizer.kind", "lion", "adamw"),
    "weights made without storage, and no sharding": lambda cell: cell.dense == "RR",
}
TABLE = [*OURS, *(row for row in FOREIGN.values() if isinstance(row, Refusal))]
SUPPORTED = {name: row for name, row in FOREIGN.items() if not isinstance(row, Refusal)}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, tuple[int, str]]]:
    """What both commands said of every row."""
    folder = tmp_path_factory.mktemp("refusals")
    for number, row in enumerate(TABLE):
        (folder / f"{number}.yaml").write_text(yaml.safe_dump(tree(**row.sections)))
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.cli.refused", str(folder)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert not result["ray"], "no row may come so far as to start Ray"
    assert result["left"] == [], "nor leave anything behind"
    return dict(result["said"])


@pytest.mark.parametrize(
    "number", range(len(TABLE)), ids=[f"{row.field}={row.value}" for row in TABLE]
)
@pytest.mark.parametrize("command", ["plan", "train"])
def test_a_layout_is_refused(
    said: dict[str, dict[str, tuple[int, str]]], command: str, number: int
) -> None:
    row = TABLE[number]
    code, text = said[str(number)][command]
    assert code == 2, text
    lines = [line for line in text.splitlines() if line.startswith(f"{row.field} = ")]
    assert lines, text
    named = Path(str(row.value)).name if "path" in row.field else str(row.value)
    assert row.value is None or named in lines[0]
    assert row.remedy in lines[0].rpartition(": ")[2] and lines[0].endswith((".", "?"))
    assert "Traceback" not in text


@pytest.mark.parametrize("name", SUPPORTED)
def test_what_others_refuse_is_trained(name: str) -> None:
    assert any(SUPPORTED[name](cell) for cell in CELLS)
