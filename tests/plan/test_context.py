"""Plans of context parallelism against what real ranks send each other, and its memory."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shoal.config import Config
from shoal.fsdp import Ledger, MixedPrecision, microbatch, placements_for
from shoal.models import Decoder, DecoderConfig, initialize, shard_decoder
from shoal.parallel.context import ContextParallel
from shoal.plan import Kind, Plan, make_plan, read_decoder_config
from shoal.plan.activations import Kernels, layer_bytes
from shoal.topology import Axis
from tests.plan.configs import DENSE, EXPERTS, config
from tests.plan.measured import Calls, bytes_kept, calls_of
from tests.ranks import RankPool

GROUPED = {**DENSE, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 22}


def one_step(settings: Config) -> Calls:
    """Every collective of this rank's step."""
    plan, ledger, device = make_plan(settings), Ledger(), torch.device("cpu")
    context = ContextParallel.over(
        plan.topology, device, settings.parallel.context_exchange, ledger.communicator
    )
    with torch.device("meta"):
        model = Decoder(
            read_decoder_config(settings.model),
            plan.precision.compute,
            recompute=settings.train.recompute,
            context=context,
        )
    dense, expert = settings.sharding.dense, settings.sharding.expert
    schedule = shard_decoder(
        model,
        plan.topology.meshes("cpu"),
        placements_for(dense.outer, dense.inner),
        placements_for(expert.outer, expert.inner),
        MixedPrecision(),
        device,
        communicators=ledger.communicator,
    )
    initialize(model, seed=0)
    ledger.clear()
    for index in range(plan.batches.num_microbatches):
        tokens = torch.randint(0, 257, (plan.batches.micro_batch, plan.batches.seq_len))
        with microbatch(schedule, is_last=index == plan.batches.num_microbatches - 1):
            output = model(tokens, labels=tokens)
            loss = output.loss_sum if output.auxiliary is None else sum(output[1:3])
            loss.backward()
    return calls_of(ledger)


def steps(all_settings: list[Config]) -> list[Calls]:
    return [one_step(settings) for settings in all_settings]


def planned(plan: Plan, rank: int) -> Calls:
    calls: defaultdict[tuple[str, tuple[int, ...]], tuple[int, int]] = defaultdict(lambda: (0, 0))
    for traffic in plan.traffic:
        stream = traffic.stream
        both = stream.layers == "dense" or stream.axis == "expert"
        axis = Axis(stream.axis if both else f"expert_{stream.axis}")
        members = next(group for group in plan.topology.groups(axis) if rank in group)
        count, nbytes = calls[traffic.stream.deed, members]
        calls[traffic.stream.deed, members] = (
            count + traffic.count,
            nbytes + traffic.payload_bytes,
        )
    return dict(calls)


def settings_of(world_size: int, context: int, exchange: str, **sections: Any) -> Config:
    base: dict[str, Any] = {
        "model": {"config": {**EXPERTS, "num_key_value_heads": 1}},
        "data": {"seq_len": 17},
        "cluster": {"workers": world_size, "device": "cpu", "nvlink_domain": context},
        "parallel": {"context": context, "context_exchange": exchange},
        "train": {"steps": 1, "micro_batch": 2, "global_batch": 6 * world_size // context},
        "sharding": {"dense": {"outer": "optimizer", "inner": "parameters"}},
    }
    for name, section in sections.items():
        base[name] = {**base.get(name, {}), **section}
    return config(**base)


@pytest.mark.parametrize("exchange", ["gather", "ring"])
@pytest.mark.parametrize(("world_size", "context"), [(2, 2), (4, 2), (4, 4)])
def test_every_collective_of_a_step_is_planned(
    ranks: RankPool, world_size: int, context: int, exchange: str
) -> None:
    cells = [
        settings_of(world_size, context, exchange),
        settings_of(world_size, context, exchange, precision={"compute": "bf16"}),
        settings_of(world_size, context, exchange, train={"recompute": "layer", "steps": 1}),
        settings_of(world_size, context, exchange, model={"config": GROUPED}),
    ]
    by_rank = ranks.run(world_size, steps, cells)
    for index, settings in enumerate(cells):
        plan = make_plan(settings)
        for rank in range(world_size):
            assert planned(plan, rank) == by_rank[rank][index], (settings, rank)


@pytest.mark.parametrize("exchange", ["gather", "ring"])
@pytest.mark.parametrize(("context", "expert"), [(2, 2), (2, 4), (4, 2)])
def test_shared_experts_are_planned_with_shared_sequences(
    ranks: RankPool, context: int, expert: int, exchange: str
) -> None:
    """What tokens take to their experts is up to the routing: the mean of the ranks is planned."""
    settings = settings_of(
        4,
        context,
        exchange,
        model={"config": {**EXPERTS, "num_experts": 8}},
        data={"seq_len": 16},
        cluster={"nvlink_domain": 4},
        parallel={"expert": expert},
    )
    plan = make_plan(settings)
    by_rank = ranks.run(4, one_step, settings)
    for rank, calls in enumerate(by_rank):
        expected = planned(plan, rank)
        assert {key: count for key, (count, _) in expected.items()} == {
            key: count for key, (count, _) in calls.items()
        }
        for (deed, members), (_, nbytes) in expected.items():
            counted = [by_rank[member][deed, members][1] for member in members]
            assert sum(counted) == nbytes * len(members), (deed, members)
            assert deed == "all_to_all" or counted == [nbytes] * len(members)


def kept_bytes(settings: Config) -> int:
    """Bytes that autograd holds after the layers' forward, weights excluded."""
    plan = make_plan(settings)
    context = ContextParallel.over(
        plan.topology, torch.device("cpu"), settings.parallel.context_exchange
    )
    model = Decoder(read_decoder_config(settings.model), plan.precision.compute, context=context)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    tokens = torch.randint(0, 257, (plan.batches.micro_batch, plan.batches.seq_len))
    num_bytes = bytes_kept(lambda: model._hidden(tokens, None, None), model.parameters())
    dist.barrier()
    return num_bytes


@pytest.mark.parametrize("exchange", ["gather", "ring"])
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_activations_are_divided(ranks: RankPool, compute: str, exchange: str) -> None:
    settings = settings_of(
        2,
        2,
        exchange,
        model={"config": GROUPED},
        data={"seq_len": 64},
        precision={"compute": compute},
    )
    decoder = DecoderConfig.from_hf(GROUPED)
    kernels = Kernels(element_bytes=4 if compute == "fp32" else 2, fused_norm=False)
    num_tokens = 2 * 32
    expected = sum(layer_bytes(decoder, i, kernels, num_tokens) for i in range(decoder.num_layers))
    expected += num_tokens * kernels.norm(decoder.hidden_size)
    for kept in ranks.run(2, kept_bytes, settings):
        assert kept == pytest.approx(expected, rel=0.03)


def test_a_rank_plans_with_its_tokens_and_the_keys_of_others() -> None:
    alone = make_plan(settings_of(1, 1, "gather", data={"seq_len": 64}))
    gather = make_plan(settings_of(4, 4, "gather", data={"seq_len": 64}))
    ring = make_plan(settings_of(4, 4, "ring", data={"seq_len": 64}))
    sizes = [plan.memory[0].num_bytes for plan in (alone, gather, ring)]
    assert sizes[0][Kind.ACTIVATIONS] == 4 * sizes[1][Kind.ACTIVATIONS]
    assert sizes[1][Kind.ACTIVATIONS] == sizes[2][Kind.ACTIVATIONS]
    assert sizes[0][Kind.EXCHANGE] == 0
    # A share: keys and values of 2 x 16 tokens, one head of 16, in fp32.
    share = 4 * 2 * 2 * 16 * 16
    assert sizes[1][Kind.EXCHANGE] == 4 * 4 * share
    assert sizes[2][Kind.EXCHANGE] == 5 * share
    assert alone.batches == gather.batches
