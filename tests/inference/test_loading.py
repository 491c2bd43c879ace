"""From a folder and settings to an engine: what is refused at its load."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shoal.config import ServeSettings
from shoal.errors import ConfigError
from shoal.inference.loading import certified, load_engine
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


def test_who_gives_the_promise_up_is_served_without_proof(tmp_path: Path) -> None:
    folder = random_folder(TINY["smollm2"], tmp_path / "m")
    engine = load_engine(folder, ServeSettings(batch_invariant=False))
    certificate = certified(engine)
    assert not certificate.passed and certificate.fingerprint == "none"
