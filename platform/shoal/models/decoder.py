"""The decoder: embedding, layers, norm, head. Parameters have their Hugging Face names."""

from __future__ import annotations

from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shoal import ops
from shoal.errors import ConfigError
from shoal.models.balance import BalanceLoss
from shoal.models.config import DecoderConfig
from shoal.models.embedding import Embedding
from shoal.models.layer import DecoderLayer
from shoal.models.linear import Linear
from shoal.models.norm import RMSNorm
from shoal.models.rotary import rotary_angles
from shoal.parallel.context import ContextParallel

Recompute = Literal["none", "layer"]


class DecoderOutput(NamedTuple):
    """What a forward pass gives; a tuple because module hooks find tensors in tuples only."""

    logits: torch.Tensor | None
    """``[B, S, V]`` in the model's dtype, without labels."""
    loss_sum: torch.Tensor | None
    """With labels: the cross-entropy summed over all labels, fp32 scalar."""
    auxiliary: torch.Tensor | None
    """With mixture-of-experts layers: the load-balancing loss summed over the B sequences, without
    its coefficient, fp32 scalar."""
    log_probabilities: torch.Tensor | None = None
    """Where asked for: the log-probability of each label, ``[B, S]`` fp32, 0 where it is -100."""


class _Trunk(nn.Module):
    """What Hugging Face calls the model: everything but the head. It only holds the names."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer, dtype) for layer in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)


class Decoder(nn.Module):
    """A causal language model, dense or with mixtures of experts.

    Matrices are left unfilled: ``initialize`` or ``load_weights`` fills them, also when the model
    was built under ``torch.device("meta")`` and sharded before.
    """

    def __init__(
        self,
        config: DecoderConfig,
        dtype: torch.dtype,
        *,
        recompute: Recompute = "none",
        context: ContextParallel | None = None,
    ) -> None:
        """Make the modules.

        Args:
            config: What they are.
            dtype: Of all parameters.
            recompute: ``layer`` keeps only each layer's input and computes the rest in backward.
            context: The ranks that share the tokens of each sequence; each computes its own part.
        """
        super().__init__()
        self.config = config
        self.recompute = recompute
        self.context = context
        self.model = _Trunk(config, dtype)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, dtype, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self,
        tokens: torch.Tensor,
        *,
        positions: torch.Tensor | None = None,
        documents: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        each_label: bool = False,
    ) -> DecoderOutput:
        """Logits of ``tokens``, or with ``labels`` their loss; all arguments ``[B, S]`` int64.

        ``positions`` count from 0 along each sequence where unset. A token attends within its run
        of equal numbers in ``documents``. ``labels`` are already shifted; -100 counts nothing.
        ``each_label`` gives their log-probabilities one by one in the place of the loss.

        With context parallelism every rank of the group is given all of S and returns what concerns
        its own tokens: their logits or log-probabilities, their part of the loss.
        """
        hidden, auxiliary = self._hidden(tokens, positions, documents)
        labels = None if labels is None else self._own(labels)
        if labels is None:
            return DecoderOutput(ops.logits(hidden, self.lm_head.weight), None, auxiliary)
        if each_label:
            rows, targets = hidden.flatten(0, 1), labels.flatten()
            each = ops.token_log_probabilities(rows, self.lm_head.weight, targets)
            return DecoderOutput(None, None, auxiliary, each.view_as(labels))
        loss = ops.linear_cross_entropy(hidden.flatten(0, 1), self.lm_head.weight, labels.flatten())
        return DecoderOutput(None, loss, auxiliary)

    def _hidden(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None,
        documents: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The head's input ``[B, S, H]`` and the load-balancing loss."""
        config, length = self.config, tokens.shape[1]
        if config.rotary.kind == "dynamic" and length > config.max_position_embeddings:
            raise ConfigError(
                "data.seq_len",
                length,
                "dynamic rotary scaling past the model's context would turn every position "
                "differently in sequences of different lengths",
                f"Take at most {config.max_position_embeddings}, or yarn scaling",
            )
        hidden = self.model.embed_tokens(self._own(tokens))
        if positions is None:
            positions = torch.arange(length, device=tokens.device).unsqueeze(0)
        angles = (config.rotary, config.head_dim, self._own(positions), hidden.dtype)
        cosine, sine = rotary_angles(*angles)
        attend = self._attend(tokens, documents)
        balance = BalanceLoss()
        for layer in self.model.layers:
            if self.recompute == "layer" and torch.is_grad_enabled():
                hidden, visits, mass = checkpoint(
                    layer, hidden, cosine, sine, attend, use_reentrant=False
                )
            else:
                hidden, visits, mass = layer(hidden, cosine, sine, attend)
            balance.add(visits, mass)
        return self.model.norm(hidden), balance.total(length, self.context)

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part of ``[B, S]`` that this rank computes."""
        return tensor if self.context is None else self.context.take(tensor)

    def _attend(self, tokens: torch.Tensor, documents: torch.Tensor | None) -> ops.Attend:
        """Attention in the batch, both arguments whole."""
        spans = None if documents is None else ops.DocumentSpans.of(documents)
        if self.context is None:
            return partial(ops.attend, spans=spans)
        return self.context.attention((tokens.shape[0], tokens.shape[1]), spans)
