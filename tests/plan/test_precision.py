"""What ``auto`` means on which machine."""

from __future__ import annotations

import pytest
import torch

from shoal.errors import ConfigError
from shoal.plan.machine import Machine
from shoal.plan.precision import resolve_device, resolve_precision
from tests.plan.configs import config


@pytest.mark.parametrize("has_cuda", [False, True])
@pytest.mark.parametrize("has_bf16", [False, True])
@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_auto(has_cuda: bool, has_bf16: bool, device: str) -> None:
    machine = Machine(has_cuda=has_cuda, cpu_has_bf16=has_bf16)
    settings = config(precision={"compute": "auto"}, cluster={"device": device})
    on_cuda = has_cuda and device == "auto"
    assert resolve_device(settings, machine) == ("cuda" if on_cuda else "cpu")
    precision = resolve_precision(settings, machine)
    assert precision.compute is (torch.bfloat16 if on_cuda or has_bf16 else torch.float32)
    words = "CUDA" if on_cuda else "with bf16" if has_bf16 else "without bf16"
    assert words in precision.reason


def test_what_is_asked_for_is_taken() -> None:
    settings = config(
        precision={
            "compute": "bf16",
            "parameter_gather": "bf16",
            "main_weights": "bf16",
            "main_gradients": "bf16",
            "reduce": "bf16",
            "moments": "bf16",
        }
    )
    precision = resolve_precision(settings, Machine(has_cuda=False, cpu_has_bf16=False))
    formats = {
        precision.compute,
        precision.main_weights,
        precision.main_gradients,
        precision.reduce,
        precision.moments,
    }
    assert formats == {torch.bfloat16}
    assert precision.reason == "as asked"


def test_no_cuda_no_auto() -> None:
    settings = config(precision={"compute": "auto"}, cluster={"device": "cuda"})
    with pytest.raises(ConfigError, match=r"cluster\.device = 'cuda': no CUDA device is found"):
        resolve_precision(settings, Machine(has_cuda=False, cpu_has_bf16=True))


def test_this_machine_can_be_asked() -> None:
    machine = Machine.here()
    assert machine.has_cuda == torch.cuda.is_available()
    assert resolve_precision(config(precision={"compute": "auto"})).compute in (
        torch.float32,
        torch.bfloat16,
    )
