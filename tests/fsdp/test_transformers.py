"""A model of the transformers library, sharded without its knowledge, trains as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shoal.config import Level
from shoal.fsdp import fully_shard_optimizer, gradient_norm
from tests.fsdp.toys import O, P, R, assert_same_weights, mesh_of, placements_on, shard
from tests.ranks import RankPool


def _llama(tied: bool) -> Any:
    # Slow to import, and only this file needs it.
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=66,
        intermediate_size=90,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=22,
        tie_word_embeddings=tied,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


def _trains(levels: list[tuple[Level, Level]], recompute: bool) -> None:
    rank, mesh = dist.get_rank(), mesh_of((2, 2))
    for tied, (outer, inner) in zip((False, True, False), levels, strict=True):
        model, reference = _llama(tied), _llama(tied)
        if recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        shard(
            model,
            mesh,
            placements_on(mesh, outer, inner),
            model.model.layers,
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        alone = torch.optim.SGD(reference.parameters(), lr=0.5)
        fully_shard_optimizer(optimizer)
        generator = torch.Generator().manual_seed(5)
        for _ in range(3):
            tokens = torch.randint(257, (4, 2, 9), generator=generator)
            optimizer.zero_grad()
            alone.zero_grad()
            loss = model(input_ids=tokens[rank], labels=tokens[rank]).loss
            loss.backward()
            losses = [reference(input_ids=t, labels=t).loss for t in tokens]
            torch.testing.assert_close(loss, losses[rank], rtol=1e-5, atol=0)
            torch.stack(losses).mean().backward()
            gradients = [p.grad for p in reference.parameters() if p.grad is not None]
            expected = torch.stack([gradient.norm() for gradient in gradients]).norm()
            torch.testing.assert_close(gradient_norm(model), expected, rtol=1e-5, atol=0)
            optimizer.step()
            alone.step()
        assert isinstance(model, nn.Module)
        assert_same_weights(model, reference, 1e-5, 1e-6)


@pytest.mark.parametrize("recompute", [False, True])
def test_llama(ranks: RankPool, recompute: bool) -> None:
    ranks.run(4, _trains, [(P, P), (O, P), (R, O)], recompute)
