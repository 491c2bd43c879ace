"""Experts shared by ranks: each keeps a part of them, and tokens travel there and back."""

from shoal.parallel.expert.degree import check_expert_degree
from shoal.parallel.expert.exchange import ExpertExchange
from shoal.parallel.expert.visit import visit_shared_experts

__all__ = ["ExpertExchange", "check_expert_degree", "visit_shared_experts"]
