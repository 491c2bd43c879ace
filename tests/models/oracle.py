"""Models of ``transformers`` with random weights, and decoders with the same."""

from __future__ import annotations

from typing import Any

import torch

from shoal.models import Decoder, DecoderConfig

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
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn_like(buffer) * 0.2)
    return model.eval()


def copied(hf: dict[str, Any], model: Any) -> Decoder:
    decoder = Decoder(DecoderConfig.from_hf(hf), torch.float32).eval()
    theirs = dict(model.named_parameters(remove_duplicate=False))
    ours = dict(decoder.named_parameters(remove_duplicate=False))
    assert ours.keys() == theirs.keys()
    with torch.no_grad():
        for name, parameter in ours.items():
            parameter.copy_(theirs[name].reshape(parameter.shape))
        for name, buffer in decoder.named_buffers():
            buffer.copy_(model.get_buffer(name))
    return decoder


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float(((ours - theirs).norm() / theirs.norm().clamp_min(1e-30)).item())


def tokens_and_labels() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 257, (BATCH, LENGTH), generator=generator)
    labels = torch.randint(0, 257, (BATCH, LENGTH), generator=generator)
    labels[0, :7] = -100
    return tokens, labels
