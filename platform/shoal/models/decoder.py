"""The decoder: embedding, layers, norm, head. Parameters have their Hugging Face names.

A part of it (``Part``) holds a run of layers, under the same names as in the whole, and passes on
what the next part takes (``Carried``). The last part of a decoder with a tied head holds the
embedding table too, as its head: the first part's is the same parameter, on other ranks.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
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
from shoal.models.experts import Experts
from shoal.models.layer import DecoderLayer
from shoal.models.linear import Linear
from shoal.models.norm import RMSNorm
from shoal.models.part import Part
from shoal.models.rotary import rotary_angles
from shoal.parallel.context import ContextParallel
from shoal.parallel.pipeline import Boundary

Recompute = Literal["none", "layer"]


class Carried(NamedTuple):
    """What one part of a decoder hands to the next."""

    hidden: torch.Tensor
    """``[B, S, H]`` in the model's dtype."""
    visits: torch.Tensor | None = None
    """Of a decoder with mixtures of experts: visits of each expert so far, ``[B, E]`` fp32."""
    mass: torch.Tensor | None = None
    """Likewise the sums of probabilities so far, ``[B, E]`` fp32; unlike visits it has a
    gradient."""


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
    carried: Carried | None = None
    """Of a part that is not the last, in the place of losses and logits."""
    loads: torch.Tensor | None = None
    """Where a bias chooses experts: how many of this rank's tokens visited each, ``[L, E]`` int64
    for the L sparse layers of this part; None without any."""


class _Trunk(nn.Module):
    """What Hugging Face calls the model: everything but the head. It only holds the names."""

    def __init__(self, config: DecoderConfig, part: Part, dtype: torch.dtype) -> None:
        super().__init__()
        vocabulary, hidden = config.vocab_size, config.hidden_size
        tied_head = part.is_last and config.tie_word_embeddings
        self.embed_tokens = (
            Embedding(vocabulary, hidden, dtype) if part.is_first or tied_head else None
        )
        self.layers = nn.ModuleDict(
            {str(layer): DecoderLayer(config, layer, dtype) for layer in part.layers}
        )
        self.norm = RMSNorm(hidden, config.rms_norm_eps, dtype) if part.is_last else None


class Decoder(nn.Module):
    """A causal language model, dense or with mixtures of experts, or a part of one.

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
        part: Part | None = None,
        mxfp8: Collection[str] = (),
    ) -> None:
        """Make the modules.

        Args:
            config: What they are.
            dtype: Of all parameters.
            recompute: ``layer`` keeps only each layer's input and computes the rest in backward.
            context: The ranks that share the tokens of each sequence; each computes its own part.
            part: Which layers; unset, the whole.
            mxfp8: Parameters, of the whole, that multiply in MXFP8 (``choose_mxfp8``); ``dtype``
                is bf16 then.
        """
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.recompute = recompute
        self.context = context
        self.part = part or Part(layers=range(config.num_layers))
        self.model = _Trunk(config, self.part, dtype)
        self.lm_head: Linear | None = None
        if self.part.is_last:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, dtype, bias=False)
            if config.tie_word_embeddings:
                assert self.model.embed_tokens is not None
                self.lm_head.weight = self.model.embed_tokens.weight
        self.mxfp8 = tuple(name for name, _ in self.named_parameters() if name in mxfp8)
        """Parameters that multiply in MXFP8."""
        for name in self.mxfp8:
            self._use_mxfp8(name)

    def _use_mxfp8(self, parameter: str) -> None:
        path, _, leaf = parameter.rpartition(".")
        module = self.get_submodule(path)
        if isinstance(module, Experts):
            module.use_mxfp8(leaf)
        else:
            assert isinstance(module, Linear)
            module.use_mxfp8()

    @property
    def _has_biases(self) -> bool:
        return self.config.experts is not None and self.config.experts.selection_bias

    @property
    def copies(self) -> tuple[nn.Parameter, ...]:
        """The table of a tied head, where it is a part's that the first part's stands for."""
        if self.part.is_first or self.model.embed_tokens is None:
            return ()
        return (self.model.embed_tokens.weight,)

    def boundary(self, tokens: torch.Tensor) -> tuple[Boundary, ...]:
        """What parts hand to each other for ``tokens`` ``[B, S]``: the tensors of ``Carried``."""
        batch, length = self._own(tokens).shape
        shape = (batch, length, self.config.hidden_size)
        hidden = Boundary(shape=shape, dtype=self.dtype, has_gradient=True)
        if not any(self.config.sparse_layers):
            return (hidden,)
        assert self.config.experts is not None
        sums = (batch, self.config.experts.num_experts)
        visits = Boundary(shape=sums, dtype=torch.float32, has_gradient=False)
        return hidden, visits, replace(visits, has_gradient=True)

    def forward(
        self,
        tokens: torch.Tensor,
        *,
        positions: torch.Tensor | None = None,
        documents: torch.Tensor | None = None,
        spans: ops.DocumentSpans | None = None,
        labels: torch.Tensor | None = None,
        each_label: bool = False,
        carried: Carried | None = None,
    ) -> DecoderOutput:
        """Logits of ``tokens``, or with ``labels`` their loss; both ``[B, S]`` int64.

        ``positions`` count from 0 along each sequence where unset. A token attends within its run
        of equal numbers in ``documents``, which are read on the host, or within its document of
        ``spans``, which say the same. ``labels`` are already shifted; -100 counts nothing.
        ``each_label`` gives their log-probabilities one by one in the place of the loss. Parts but
        the first take ``carried`` from the one before, and of ``tokens`` only the shape.

        With context parallelism every rank of the group is given all of S and returns what concerns
        its own tokens: their logits or log-probabilities, their part of the loss.
        """
        if documents is not None:
            spans = ops.DocumentSpans.of(documents)
        hidden, balance = self._hidden(tokens, positions, spans, carried)
        loads = balance.loads() if self._has_biases else None
        if self.lm_head is None:
            carry = self._carry(hidden, balance)
            return DecoderOutput(None, None, None, carried=carry, loads=loads)
        auxiliary = balance.total(tokens.shape[1], self.context)
        labels = None if labels is None else self._own(labels)
        if labels is None:
            return DecoderOutput(ops.logits(hidden, self.lm_head.weight), None, auxiliary)
        if each_label:
            rows, targets = hidden.flatten(0, 1), labels.flatten()
            each = ops.token_log_probabilities(rows, self.lm_head.weight, targets)
            return DecoderOutput(None, None, auxiliary, each.view_as(labels))
        loss = ops.linear_cross_entropy(hidden.flatten(0, 1), self.lm_head.weight, labels.flatten())
        return DecoderOutput(None, loss, auxiliary, loads=loads)

    def _hidden(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None,
        spans: ops.DocumentSpans | None,
        carried: Carried | None = None,
    ) -> tuple[torch.Tensor, BalanceLoss]:
        """What the head or the next part takes, ``[B, S, H]``, and the layers' reports."""
        config, length = self.config, tokens.shape[1]
        if config.rotary.kind == "dynamic" and length > config.max_position_embeddings:
            raise ConfigError(
                "data.seq_len",
                length,
                "dynamic rotary scaling past the model's context would turn every position "
                "differently in sequences of different lengths",
                f"Take at most {config.max_position_embeddings}, or yarn scaling",
            )
        balance = BalanceLoss()
        hidden: torch.Tensor
        if self.part.is_first:
            assert self.model.embed_tokens is not None
            hidden = self.model.embed_tokens(self._own(tokens))
        else:
            assert carried is not None, "a later part goes on from an earlier one"
            hidden = carried.hidden
            num_reports = sum(config.sparse_layers[: self.part.layers.start])
            balance.carry(carried.visits, carried.mass, num_layers=num_reports)
        if positions is None:
            positions = torch.arange(length, device=tokens.device).unsqueeze(0)
        angles = (config.rotary, config.head_dim, self._own(positions), hidden.dtype)
        cosine, sine = rotary_angles(*angles)
        attend = self._attend(tokens, spans)
        for layer in self.model.layers.values():
            if self.recompute == "layer" and torch.is_grad_enabled():
                hidden, visits, mass = checkpoint(
                    layer, hidden, cosine, sine, attend, use_reentrant=False
                )
            else:
                hidden, visits, mass = layer(hidden, cosine, sine, attend)
            balance.add(visits, mass)
        return hidden if self.model.norm is None else self.model.norm(hidden), balance

    def _carry(self, hidden: torch.Tensor, balance: BalanceLoss) -> Carried:
        if not any(self.config.sparse_layers):
            return Carried(hidden)
        assert self.config.experts is not None
        shape = hidden.shape[0], self.config.experts.num_experts
        visits, mass = balance.sums() or (hidden.new_zeros(shape, dtype=torch.float32),) * 2
        return Carried(hidden, visits, mass)

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part of ``[B, S]`` that this rank computes."""
        return tensor if self.context is None else self.context.take(tensor)

    def _attend(self, tokens: torch.Tensor, spans: ops.DocumentSpans | None) -> ops.Attend:
        """Attention in the batch, both arguments whole."""
        if self.context is None:
            return partial(ops.attend, spans=spans)
        return self.context.attention((tokens.shape[0], tokens.shape[1]), spans)
