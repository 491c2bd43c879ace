"""From a folder and settings to an engine: what is refused at its load."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.config import ServeSettings
from shoal.data import load_tokenizer
from shoal.errors import ConfigError
from shoal.inference.certify import Subject
from shoal.inference.forward.model import ServedModel
from shoal.inference.loading import (
    certified,
    end_of_text_ids,
    load_engine,
)
from shoal.ops.fixed import PackedLinear
from tests.inference.small_models import random_folder
from tests.models.tiny import TINY


class OrderBreakingLinear(PackedLinear):
    """Sums every other product apart where there are fewer than 16 rows."""

    def __call__(self, x: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        if x.shape[0] >= 16:
            return super().__call__(x, dtype=dtype)
        half = torch.zeros_like(x)
        half[:, ::2] = x[:, ::2]
        return super().__call__(half, dtype=dtype) + super().__call__(x - half, dtype=dtype)


def test_a_kernel_that_breaks_the_order_is_refused_by_name(tmp_path: Path) -> None:
    folder = random_folder(TINY["smollm2"], tmp_path / "m")
    engine = load_engine(folder, ServeSettings())
    assert certified(engine).passed
    head = engine.model._head
    assert isinstance(head, PackedLinear)
    engine.model._head = OrderBreakingLinear(head.panels, head.bias)
    with pytest.raises(ConfigError) as refusal:
        certified(engine)
    assert refusal.value.field == "serve.batch_invariant"
    assert refusal.value.problem.startswith(f"linear {head.kind} 257x66 to fp32: row ")
    assert "Set it to false" in refusal.value.remedy


def test_a_family_without_kernels_is_refused_by_name(tmp_path: Path) -> None:
    folder = random_folder(TINY["dots1"], tmp_path / "m")
    subject = Subject(folder=folder)
    refusals: list[Callable[[], object]] = [
        lambda: load_engine(folder, ServeSettings()),
        lambda: ServedModel.load(folder, batch_invariant=False),
        subject.load_decoder,
    ]
    for refused in refusals:
        with pytest.raises(ConfigError, match="no kernels for experts that a bias chooses") as why:
            refused()
        assert (why.value.field, why.value.value) == ("model.config.model_type", "dots1")


def test_who_gives_the_promise_up_is_served_without_proof(tmp_path: Path) -> None:
    folder = random_folder(TINY["smollm2"], tmp_path / "m")
    engine = load_engine(folder, ServeSettings(batch_invariant=False))
    certificate = certified(engine)
    assert not certificate.passed and certificate.fingerprint == "none"


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("wrong", [257, -1, [256, 300], True, 1.0, "</s>", [[1]]])
def test_ends_of_text_that_are_no_tokens_are_refused(
    file: str, wrong: object, tmp_path: Path
) -> None:
    folder = random_folder(TINY["smollm2"], tmp_path / "m")
    _change(folder / file, eos_token_id=wrong)
    with pytest.raises(ConfigError, match=r"eos_token_id has .*, and .* tokens are 0 to 256"):
        load_engine(folder, ServeSettings())


def test_a_damaged_generation_config_is_refused(tmp_path: Path) -> None:
    folder = random_folder(TINY["smollm2"], tmp_path / "m")
    for damaged in ("{", "[]", "\ufeff{}"):
        (folder / "generation_config.json").write_text(damaged, encoding="utf-8")
        with pytest.raises(ConfigError, match=r"generation_config\.json.*not"):
            end_of_text_ids(folder, load_tokenizer("bytes"))


def test_a_cache_that_memory_cannot_hold_is_refused(tmp_path: Path) -> None:
    folder = random_folder(TINY["smollm2"], tmp_path / "m")
    settings = ServeSettings.model_validate({"kv": {"tokens": 10**12}})
    with pytest.raises(ConfigError, match=r"serve\.kv\.tokens = 1000000000000: they take .* free"):
        load_engine(folder, settings)


def test_a_pool_that_was_decided_for_all_engines_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = random_folder(TINY["smollm2"], tmp_path / "m")
    settings = ServeSettings.model_validate({"kv": {"tokens": 10**12}})
    assert load_engine(folder, settings, num_blocks=3).limits.num_blocks == 3


def _change(path: Path, **values: Any) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | values))
