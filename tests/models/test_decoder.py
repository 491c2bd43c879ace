"""The decoder against ``transformers``: same weights, same logits, same gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from shoal.models import Decoder, DecoderConfig
from tests.models.tiny import TINY

BATCH, LENGTH = 3, 21


def reference(hf: dict[str, Any]) -> Any:
    """The model of ``transformers`` with random weights, biases and norms included."""
    import transformers

    kind = {k: v for k, v in hf.items() if k != "model_type"}
    config = transformers.AutoConfig.for_model(hf["model_type"], **kind)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    torch.manual_seed(11)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


def copied(hf: dict[str, Any], model: Any) -> Decoder:
    decoder = Decoder(DecoderConfig.from_hf(hf), torch.float32).eval()
    theirs = dict(model.named_parameters(remove_duplicate=False))
    ours = dict(decoder.named_parameters(remove_duplicate=False))
    assert ours.keys() == theirs.keys()
    with torch.no_grad():
        for name, parameter in ours.items():
            parameter.copy_(theirs[name].reshape(parameter.shape))
    return decoder


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float(((ours - theirs).norm() / theirs.norm().clamp_min(1e-30)).item())


def tokens_and_labels() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 257, (BATCH, LENGTH), generator=generator)
    labels = torch.randint(0, 257, (BATCH, LENGTH), generator=generator)
    labels[0, :7] = -100
    return tokens, labels


@pytest.mark.parametrize("name", TINY)
def test_logits_and_gradients_equal_transformers(name: str) -> None:
    model = reference(TINY[name])
    decoder = copied(TINY[name], model)
    tokens, labels = tokens_and_labels()

    theirs = model(tokens).logits
    functional.cross_entropy(theirs.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    ours = decoder(tokens).logits
    assert ours is not None
    assert relative(ours, theirs) < 1e-5
    loss = decoder(tokens, labels=labels).loss_sum
    assert loss is not None
    loss.backward()

    gradients = {n: p.grad for n, p in model.named_parameters()}
    for parameter_name, parameter in decoder.named_parameters():
        gradient = gradients[parameter_name]
        assert parameter.grad is not None, parameter_name
        error = relative(parameter.grad, gradient.reshape(parameter.shape))
        assert error < 1e-5, (parameter_name, error)
