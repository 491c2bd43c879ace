"""The decoder against ``transformers``: same weights, same logits, same gradients."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from shoal.errors import ConfigError
from shoal.models import Decoder, DecoderConfig
from tests.models.oracle import copied, reference, relative, tokens_and_labels
from tests.models.tiny import TINY


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


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe"])
def test_balance_loss_and_its_gradient_equal_transformers_by_sequence(name: str) -> None:
    model = reference(TINY[name])
    decoder = copied(TINY[name], model)
    tokens, labels = tokens_and_labels()
    expected = torch.stack(
        [model(row.unsqueeze(0), output_router_logits=True).aux_loss for row in tokens]
    ).sum()
    expected.backward()
    output = decoder(tokens, labels=labels)
    assert output.auxiliary is not None
    assert relative(output.auxiliary, expected) < 1e-5
    output.auxiliary.backward()
    gradients = {n: p.grad for n, p in model.named_parameters()}
    for parameter_name, parameter in decoder.named_parameters():
        gradient = gradients[parameter_name]
        if gradient is None:
            assert parameter.grad is None, parameter_name
        elif gradient.norm() > 0:
            assert parameter.grad is not None
            assert relative(parameter.grad, gradient.reshape(parameter.shape)) < 1e-5


@pytest.mark.parametrize("name", ["llama3", "mistral", "qwen2", "olmoe"])
def test_packed_documents_see_nothing_of_each_other(name: str) -> None:
    """Logits and gradients of packed documents equal those of each document alone."""
    model = reference(TINY[name])
    packed, alone = copied(TINY[name], model), copied(TINY[name], model)
    tokens, labels = tokens_and_labels()
    lengths = [[9, 1, 11], [21], [2, 19]]
    documents = torch.stack(
        [torch.arange(len(n)).repeat_interleave(torch.tensor(n)) for n in lengths]
    )
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    arguments = {"positions": positions, "documents": documents}

    logits = packed(tokens, **arguments).logits
    assert logits is not None
    packed(tokens, labels=labels, **arguments).loss_sum.backward()
    for sequence, row in enumerate(lengths):
        start = 0
        for length in row:
            piece = (slice(sequence, sequence + 1), slice(start, start + length))
            single = alone(tokens[piece]).logits
            assert single is not None
            assert relative(logits[piece], single) < 1e-5
            alone(tokens[piece], labels=labels[piece]).loss_sum.backward()
            start += length
    for ours, theirs in zip(packed.parameters(), alone.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert relative(ours.grad, theirs.grad) < 1e-5


@pytest.mark.parametrize("name", ["smollm2", "qwen2_moe"])
def test_recomputed_layers_give_the_same_bits_with_dropout(name: str) -> None:
    hf = TINY[name] | {"attention_dropout": 0.3}
    weights = copied(hf, reference(hf)).state_dict()
    tokens, labels = tokens_and_labels()
    results = []
    for recompute in ("none", "layer"):
        decoder = Decoder(DecoderConfig.from_hf(hf), torch.float32, recompute=recompute)
        decoder.load_state_dict(weights)
        torch.manual_seed(9)
        output = decoder.train()(tokens, labels=labels)
        loss = output.loss_sum if output.auxiliary is None else output.loss_sum + output.auxiliary
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in decoder.parameters())])
    for plain, recomputed in zip(*results, strict=True):
        assert torch.equal(plain, recomputed)


def test_dropout_is_active_in_training_only() -> None:
    hf = TINY["smollm2"] | {"attention_dropout": 0.3}
    decoder = copied(hf, reference(hf))
    tokens, _ = tokens_and_labels()
    still = decoder(tokens).logits
    assert torch.equal(still, decoder(tokens).logits)
    decoder.train()
    assert not torch.equal(still, decoder(tokens).logits)


@pytest.mark.parametrize("name", ["llama2", "olmoe", "qwen2_moe"])
def test_bf16_stays_near_fp32(name: str) -> None:
    model = reference(TINY[name])
    decoder = copied(TINY[name], model)
    tokens, labels = tokens_and_labels()
    half = Decoder(decoder.config, torch.bfloat16)
    half.load_state_dict(decoder.state_dict())
    exact, rounded = decoder(tokens, labels=labels), half(tokens, labels=labels)
    assert rounded.loss_sum.dtype == torch.float32
    assert relative(rounded.loss_sum, exact.loss_sum) < 0.02
    logits = half(tokens).logits
    assert logits is not None and logits.dtype == torch.bfloat16


def test_a_meta_decoder_has_no_storage_and_hugging_face_names() -> None:
    config = DecoderConfig.from_hf(TINY["qwen2_moe"])
    with torch.device("meta"):
        decoder = Decoder(config, torch.bfloat16)
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in decoder.parameters())
    assert list(decoder.buffers()) == []
    shapes = {name: tuple(p.shape) for name, p in decoder.named_parameters()}
    assert shapes["model.layers.0.mlp.experts.gate_up_proj"] == (6 * 2 * 14, 66)
    assert shapes["model.layers.0.mlp.experts.down_proj"] == (6 * 66, 14)


def test_dynamic_scaling_past_the_context_is_refused() -> None:
    decoder = copied(TINY["olmoe"], reference(TINY["olmoe"]))
    with pytest.raises(ConfigError, match="seq_len"):
        decoder(torch.zeros(1, 65, dtype=torch.int64))
