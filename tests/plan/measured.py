"""What plans are held against: bytes and collectives of a model on this rank, as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from shoal.fsdp import Ledger, bytes_at_rest
from shoal.plan import Kind

Calls = dict[tuple[str, tuple[int, ...]], tuple[int, int]]
"""Collectives by kind and ranks: how many, and bytes of their larger sides."""


def calls_of(ledger: Ledger) -> Calls:
    """Every collective that ``ledger`` recorded."""
    calls: Calls = {}
    for collective in ledger.collectives:
        key = (collective.deed, collective.ranks)
        count, nbytes = calls.get(key, (0, 0))
        calls[key] = (count + 1, nbytes + collective.nbytes)
    return calls


def bytes_by_kind(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes at rest after a step."""
    rest = bytes_at_rest(model)
    moments = sum(
        value.nbytes
        for state in optimizer.state.values()
        for name, value in state.items()
        if name != "step"
    )
    return {
        Kind.MAIN_WEIGHTS.value: rest.main_weights,
        Kind.COMPUTE_WEIGHTS.value: rest.compute_weights,
        Kind.GRADIENTS.value: rest.gradients,
        Kind.MOMENTS.value: moments,
    }


def bytes_kept(forward: Callable[[], object], parameters: Iterable[nn.Parameter]) -> int:
    """Bytes of the storages that autograd holds after ``forward``, ``parameters`` excluded."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    num_bytes = sum(storage.nbytes() for storage in kept.values())
    del result  # what it leads to stays until the bytes are counted
    return num_bytes
