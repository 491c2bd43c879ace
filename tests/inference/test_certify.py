"""The proof: it holds for what keeps the order, and names the case where something does not."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal.errors import ConfigError
from shoal.inference.certify import Subject, Trace, prove
from shoal.inference.certify.conditions import CONDITIONS
from shoal.inference.certify.laboratory import Laboratory
from shoal.inference.forward.model import ServedModel
from shoal.inference.forward.rows import Rows
from shoal.ops import fixed
from tests.inference.small_models import random_folder
from tests.models.tiny import TINY

DENSE: dict[str, Any] = TINY["qwen3"] | {"num_hidden_layers": 1}
SPARSE: dict[str, Any] = TINY["qwen3_moe"] | {"num_hidden_layers": 1}


class OrderBreakingModel(ServedModel):
    """Sums the head's products in another order once there are more than 15 rows."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if hidden.shape[0] <= 15:
            return super().logits(hidden)
        half = torch.zeros_like(hidden)
        half[:, ::2] = hidden[:, ::2]
        return super().logits(half) + super().logits(hidden - half)


class ChunkBreakingModel(ServedModel):
    """Computes several rows of one prompt otherwise where their beginning is known already."""

    def forward(
        self, rows: Rows, cache: fixed.KVCache, wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        hidden = super().forward(rows, cache, wanted)
        is_later_chunk = int(rows.positions.min()) > 0 and rows.tokens.shape[0] > 1
        return hidden * 1.01 if is_later_chunk and rows.block_tables.shape[0] == 1 else hidden


class HalvingLinear(fixed.PackedLinear):
    """A kernel that adds up two halves of K where it is given fewer than 16 rows."""

    def __call__(self, x: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        if x.shape[0] >= 16:
            return super().__call__(x, dtype=dtype)
        front, back = x.clone(), x.clone()
        front[:, x.shape[1] // 2 :] = 0
        back[:, : x.shape[1] // 2] = 0
        sums = super().__call__(front, dtype=torch.float32)
        sums += super().__call__(back, dtype=torch.float32)
        return sums.to(dtype or x.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class HalvingSubject(Subject):
    def load_model(self) -> ServedModel:
        model = Subject.load_model(self)
        model._head.__class__ = HalvingLinear
        return model


@dataclass(frozen=True, kw_only=True, slots=True)
class BrokenSubject(Subject):
    kind: type[ServedModel]

    def load_model(self) -> ServedModel:
        whole = Subject.load_model(self)
        whole.__class__ = self.kind
        return whole


def test_the_same_bits_everywhere(tmp_path: Path) -> None:
    folder = random_folder(SPARSE, tmp_path / "m")
    seen: list[str] = []
    proof = prove(
        Subject(folder=folder, precision="mxfp8"),
        quick=True,
        report=lambda finding: seen.append(finding.condition),
    )
    assert proof.holds, proof.first_difference
    assert proof.first_difference is None
    assert len(seen) == len(proof.findings) == 9
    assert all(finding.num_answers > 0 for finding in proof.findings)
    assert proof.as_dict()["fingerprint"] == proof.kernels.fingerprint


@pytest.mark.parametrize(
    ("kind", "first"),
    [(OrderBreakingModel, "in a batch of 16"), (ChunkBreakingModel, "in chunks of 2")],
)
def test_what_breaks_the_order_is_named(
    kind: type[ServedModel], first: str, tmp_path: Path
) -> None:
    folder = random_folder(DENSE, tmp_path / "m")
    proof = prove(BrokenSubject(folder=folder, precision="bf16", kind=kind), quick=True)
    assert not proof.holds
    assert proof.first_difference is not None and first in proof.first_difference
    assert "not" in proof.first_difference


def test_a_kernel_that_breaks_the_order_is_named_with_its_shape(tmp_path: Path) -> None:
    folder = random_folder(DENSE, tmp_path / "m")
    proof = prove(HalvingSubject(folder=folder, precision="bf16"), quick=True)
    assert not proof.holds and not proof.kernels.passed
    kernel = f"linear bf16 {DENSE['vocab_size']}x{DENSE['hidden_size']} to fp32"
    assert [each.name for each in proof.kernels.kernels if not each.passed] == [kernel]
    assert proof.first_difference is not None
    assert proof.first_difference.startswith(f"{kernel}: row ")
    assert not all(finding.holds for finding in proof.findings)


@pytest.fixture(scope="module")
def laboratory(tmp_path_factory: pytest.TempPathFactory) -> Laboratory:
    """One whose answers to lone requests are wrong in their last log-probability, by one bit."""
    folder = random_folder(DENSE, tmp_path_factory.mktemp("certify") / "m")
    lab = Laboratory(Subject(folder=folder, precision="bf16"), quick=True)
    for request in lab.questions.all:
        right = lab.alone(request)
        last = float(np.nextafter(np.float32(right.logprobs[-1]), np.float32(0)))
        lab._alone[request.id] = replace(right, logprobs=(*right.logprobs[:-1], last))
    return lab


@pytest.mark.parametrize("name", CONDITIONS)
def test_each_condition_sees_one_bit(laboratory: Laboratory, name: str) -> None:
    case = next(iter(CONDITIONS[name](laboratory)))
    assert case.requests
    for request in case.requests:
        found = laboratory.alone(request).difference(case.traces[request.id])
        assert found is not None and "log-probability of token" in found


def test_a_context_too_short_to_prove_anything_is_refused(tmp_path: Path) -> None:
    folder = random_folder(DENSE | {"max_position_embeddings": 32}, tmp_path / "m")
    with pytest.raises(ConfigError, match="max_position_embeddings = 32"):
        prove(Subject(folder=folder))


def test_traces_differ_in_the_first_bit_that_does() -> None:
    one = Trace(tokens=(1, 2), logprobs=(-1.0, -2.0), prompt_logprobs=(-3.0,))
    assert one.difference(one) is None
    other = Trace(tokens=(1, 2), logprobs=(-1.0, -2.0 + 2**-22), prompt_logprobs=(-3.0,))
    assert "log-probability of token 1" in str(one.difference(other))
    top = tuple(((token, -1.0), (7, -4.0)) for token in one.tokens)
    other = Trace(tokens=(1, 2), logprobs=(-1.0, -2.0), top=top)
    assert one.difference(other) is None  # what only one of them has is not compared
    nearly = replace(other, top=(top[0], ((2, -1.0), (7, -4.0 + 2**-21))))
    assert "the likeliest at token 1" in str(other.difference(nearly))
    other = Trace(tokens=(1, 3), logprobs=(-1.0, -2.0))
    assert one.difference(other) == "token 1 is 3, not 2"
    other = Trace(tokens=(1, 2), logprobs=(-1.0, -2.0), prompt_logprobs=(-4.0,))
    assert "prompt token 1" in str(one.difference(other))
