"""Ways to train one decoder on several ranks: ours, torch's, and one that sends nothing.

All compute in bf16 and update fp32 main weights by torch's fused AdamW; those that reduce do so in
fp32. They start from the same weights and see the same tokens.
"""

# Annotations are evaluated in this module, since DDP compares those of its hook.

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from shoal.config import Level
from shoal.fsdp import (
    MixedPrecision,
    fully_shard,
    fully_shard_context,
    fully_shard_optimizer,
    placements_for,
)
from shoal.models import Decoder, DecoderConfig, decoder_units, initialize

_LEARNING_RATE = 1e-4

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Trains on tokens and labels, both ``[B, S]``; the loss of this rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A name and how to set it up on the ranks of the default group."""

    name: str
    build: Callable[[DecoderConfig], Step]


def ours(name: str, level: Level) -> Contender:
    """Our adapter with both axes of the mesh at ``level``."""

    def build(config: DecoderConfig) -> Step:
        return step_of(*our_training(config, level))

    return Contender(name=f"shoal {name}", build=build)


def our_training(config: DecoderConfig, level: Level) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A decoder under our adapter, and its optimizer."""
    model = _decoder(config, torch.float32)
    ranks = (1, dist.get_world_size())
    mesh = init_device_mesh("cpu", ranks, mesh_dim_names=("outer", "inner"))
    placements = placements_for(Level.REPLICATE, level)
    precision = MixedPrecision(compute=torch.bfloat16)
    with fully_shard_context("cpu"):
        for unit in _units(model):
            fully_shard(unit, mesh, placements, precision=precision)
    optimizer = _adamw(model.parameters())
    fully_shard_optimizer(optimizer)
    return model, optimizer


def fsdp2(name: str, *, reshard_after_forward: bool | None) -> Contender:
    """torch's ``fully_shard``."""

    def build(config: DecoderConfig) -> Step:
        model = _decoder(config, torch.float32)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for unit in _units(model):
            fsdp.fully_shard(
                unit, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward
            )
        return step_of(model, _adamw(model.parameters()))

    return Contender(name=f"FSDP2 {name}", build=build)


def ddp() -> Contender:
    """torch's ``DistributedDataParallel``, reducing in fp32 and updating fp32 main weights."""

    def build(config: DecoderConfig) -> Step:
        model = _decoder(config, torch.bfloat16)
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
        wrapped.register_comm_hook(None, _average_in_fp32)
        return _step_with_main_weights(wrapped, list(model.parameters()), share=1)

    return Contender(name="torch DDP", build=build)


def alone() -> Contender:
    """Nothing is sent; each rank updates its share of the main weights."""

    def build(config: DecoderConfig) -> Step:
        model = _decoder(config, torch.bfloat16)
        parameters = list(model.parameters())
        return _step_with_main_weights(model, parameters, share=dist.get_world_size())

    return Contender(name="nothing sent", build=build)


def _decoder(config: DecoderConfig, dtype: torch.dtype) -> Decoder:
    model = Decoder(config, dtype)
    initialize(model, seed=0)
    return model


def _units(model: Decoder) -> list[nn.Module]:
    return [model.get_submodule(unit.path) for unit in decoder_units(model.config)]


def _adamw(parameters: Iterable[torch.Tensor]) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=_LEARNING_RATE, fused=True)


def _backward(model: nn.Module, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(tokens, labels=labels).loss_sum / labels.numel()
    loss.backward()
    return loss.detach()


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """A step of a model and its optimizer."""

    def step(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = _backward(model, tokens, labels)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def _step_with_main_weights(
    model: nn.Module, parameters: Sequence[nn.Parameter], *, share: int
) -> Step:
    """A step whose optimizer updates this rank's fp32 rows, one in ``share`` of each parameter."""
    place = dist.get_rank() % share
    rows = [parameter.detach().tensor_split(share)[place] for parameter in parameters]
    mains = [nn.Parameter(row.float()) for row in rows]
    optimizer = _adamw(mains)

    def step(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = _backward(model, tokens, labels)
        for parameter, main in zip(parameters, mains, strict=True):
            assert parameter.grad is not None
            main.grad = parameter.grad.tensor_split(share)[place].float()
            parameter.grad = None
        optimizer.step()
        for row, main in zip(rows, mains, strict=True):
            row.copy_(main.detach())
        return loss

    return step


def _average_in_fp32(_: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    narrow = bucket.buffer()
    wide = narrow.float().div_(dist.get_world_size())
    work = dist.all_reduce(wide, async_op=True)
    assert work is not None
    future: torch.futures.Future[object] = work.get_future()
    return future.then(lambda _: narrow.copy_(wide))
