"""The mixture-of-experts layer: router, routed experts, shared expert."""

from __future__ import annotations

import torch
from torch import nn

from shoal import ops
from shoal.models.config import ExpertsConfig
from shoal.models.linear import Linear
from shoal.models.mlp import MLP
from shoal.parallel.expert import ExpertExchange, visit_shared_experts


class Router(nn.Module):
    """Chooses each token's experts, in fp32 whatever the model's dtype."""

    def __init__(self, hidden: int, config: ExpertsConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.e_score_correction_bias: torch.Tensor | None
        self.weight = nn.Parameter(torch.empty(config.num_experts, hidden, dtype=dtype))
        # A buffer, because no gradient changes it; fp32, so that small steps add up.
        bias = torch.zeros(config.num_experts, dtype=torch.float32)
        self.register_buffer("e_score_correction_bias", bias if config.selection_bias else None)

    @property
    def bias(self) -> torch.Tensor | None:
        """What takes part in choosing each expert, ``[E]`` fp32; None in families without."""
        return self.e_score_correction_bias

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``tokens`` ``[T, H]`` to probabilities ``[T, E]``, choices and their weights ``[T, k]``.

        A token's choices come in increasing order of the expert's number.
        """
        config, normalize = self.config, self.config.normalize_weights
        if self.bias is None:
            return ops.route(tokens, self.weight, config.experts_per_token, normalize=normalize)
        return ops.route_with_bias(
            tokens,
            self.weight,
            self.bias,
            config.experts_per_token,
            normalize=normalize,
            scale=config.weight_scale,
        )


class Experts(nn.Module):
    """The routed experts of one layer, their weights stacked in two matrices.

    All of them, or after ``keep_part`` those that fall to this rank.
    """

    def __init__(self, hidden: int, config: ExpertsConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_experts = config.num_experts
        self.exchange: ExpertExchange | None = None
        self.products: dict[str, ops.GroupedProduct] = {
            "gate_up_proj": ops.grouped_linear,
            "down_proj": ops.grouped_linear,
        }
        num, width = config.num_experts, config.intermediate_size
        # [E * 2I, H]: the gate rows of an expert, then its up rows.
        self.gate_up_proj = nn.Parameter(torch.empty(num * 2 * width, hidden, dtype=dtype))
        # [E * H, I]
        self.down_proj = nn.Parameter(torch.empty(num * hidden, width, dtype=dtype))

    def forward(
        self, tokens: torch.Tensor, choices: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """``tokens`` ``[T, H]`` with ``choices`` and ``weights`` ``[T, k]`` to ``[T, H]``."""
        if self.exchange is not None:
            matrices = (self.gate_up_proj, self.down_proj)
            products = (self.products["gate_up_proj"], self.products["down_proj"])
            return visit_shared_experts(
                tokens, choices, weights, *matrices, self.exchange, products
            )
        return ops.visit_experts(
            tokens, choices, weights, self.gate_up_proj, self.down_proj, self.num_experts
        )

    def use_mxfp8(self, name: str) -> None:
        """Multiply with ``gate_up_proj``, or with ``down_proj``, in MXFP8 from now on."""
        self.products[name] = ops.mxfp8_grouped_linear
        if self.exchange is None:
            self.exchange = ExpertExchange(self.num_experts, None)

    def keep_part(self, exchange: ExpertExchange) -> None:
        """Keep this rank's experts alone; tokens reach the others, and theirs these, by exchange.

        The two matrices become ``[E/n * 2I, H]`` and ``[E/n * H, I]`` for n ranks.
        """
        self.exchange = exchange
        for name in ("gate_up_proj", "down_proj"):
            whole = self.get_parameter(name)
            # A copy, so that the whole matrix can be freed.
            part = whole.detach().chunk(exchange.size)[exchange.rank].clone()
            self.register_parameter(name, nn.Parameter(part, whole.requires_grad))


class SparseMLP(nn.Module):
    """A mixture of experts in the place of the MLP."""

    def __init__(self, hidden: int, config: ExpertsConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_experts = config.num_experts
        self.gate = Router(hidden, config, dtype)
        self.experts = Experts(hidden, config, dtype)
        self.shared_expert: MLP | None = None
        self.shared_expert_gate: Linear | None = None
        self.shared_experts: MLP | None = None
        if config.shared_intermediate_size is not None:
            shared = MLP(hidden, config.shared_intermediate_size, dtype)
            setattr(self, config.shared_name, shared)
            if config.shared_gate:
                self.shared_expert_gate = Linear(hidden, 1, dtype, bias=False)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``[B, S, H]`` to the same, with what the load-balancing loss needs.

        Per sequence and expert, ``[B, E]`` in fp32: how many visits it got, and the sum of its
        probabilities over the tokens; only the latter carries a gradient.
        """
        tokens = hidden.flatten(0, 1)
        probabilities, choices, weights = self.gate(tokens)
        output = self.experts(tokens, choices, weights)
        if self.shared_expert is not None and self.shared_expert_gate is not None:
            shared = self.shared_expert(tokens)
            output = ops.add_shared_expert(output, shared, tokens, self.shared_expert_gate.weight)
        elif self.shared_experts is not None:
            output = output + self.shared_experts(tokens)
        visits = probabilities.new_zeros(hidden.shape[0], self.num_experts)
        visited = choices.view(hidden.shape[0], -1)
        visits.scatter_add_(1, visited, visits.new_ones(()).expand_as(visited))
        mass = probabilities.unflatten(0, hidden.shape[:2]).sum(dim=1)
        return output.view_as(hidden), visits, mass
