"""Saved at one layout, loaded at another: weights, moments and steps are the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from shoal.checkpoint import CheckpointWeights, capture_rng, load, save
from shoal.fsdp import sharded_parameters
from tests.checkpoint import toy
from tests.ranks import RankPool


def _save(folder: Path, layout: toy.Layout, num_steps: int) -> tuple[Any, torch.Tensor]:
    run = toy.build(layout, seed=1)
    torch.manual_seed(100 + dist.get_rank())
    for number in range(num_steps):
        run.step(number)
    save(
        folder,
        num_steps,
        model=run.model,
        optimizer=run.optimizer,
        counters={"step": num_steps, "sampler": {"order": torch.arange(3)}},
        rng=capture_rng(),
    )
    return toy.held_rows(run), run.model.get_buffer("offset")


def _load(path: Path, layout: toy.Layout) -> tuple[Any, torch.Tensor, Any]:
    run = toy.build(layout, seed=2)
    offset = run.model.get_buffer("offset")
    with torch.no_grad():
        for parameter in sharded_parameters(run.model):
            parameter.local.fill_(torch.nan)
        offset.fill_(torch.nan)
    loaded = load(path, model=run.model, optimizer=run.optimizer)
    return toy.held_rows(run), offset, loaded


def _size(layout: toy.Layout) -> int:
    return layout[0] * layout[1]


@pytest.fixture(scope="module")
def saved(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A checkpoint of four ranks, and the state they had."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return folder / "step-00000003", ranks.run(4, _save, folder, toy.HFSDP, 3)


@pytest.mark.parametrize(
    "layout",
    [toy.ALONE, toy.ZERO1_2, toy.DDP_2, toy.ZERO3_3, toy.ZERO1_4, toy.HSDP, toy.HFSDP],
    ids=lambda layout: "-".join(map(str, layout)),
)
def test_hfsdp_of_four_ranks_loads_anywhere(
    ranks: RankPool, saved: tuple[Path, Any], layout: toy.Layout
) -> None:
    path, before = saved
    after = ranks.run(_size(layout), _load, path, layout)
    expected = toy.whole([held for held, _ in before])
    assert expected["embedding.weight"]["exp_avg"].shape == (toy.VOCABULARY, toy.HIDDEN)
    assert expected["embedding.weight"]["step"] == 3
    assert expected["frozen.weight"].keys() == {"weight"}
    toy.assert_equal_states(toy.whole([held for held, *_ in after]), expected)
    for _, offset, loaded in after:
        assert torch.equal(offset, before[0][1])
        assert loaded.step == 3 and loaded.counters["step"] == 3
        assert torch.equal(loaded.counters["sampler"]["order"], torch.arange(3))
        assert (loaded.rng is None) == (_size(layout) != 4)


@pytest.mark.parametrize("layout", [toy.DDP_2, toy.HSDP, toy.ZERO3_3])
def test_any_layout_loads_in_one_process(
    ranks: RankPool, tmp_path: Path, layout: toy.Layout
) -> None:
    before = ranks.run(_size(layout), _save, tmp_path, layout, 2)
    after = ranks.run(1, _load, tmp_path / "step-00000002", toy.ALONE)
    expected = toy.whole([held for held, _ in before])
    toy.assert_equal_states(toy.whole([held for held, *_ in after]), expected)


def test_plain_dcp_puts_the_shards_together(saved: tuple[Path, Any], tmp_path: Path) -> None:
    path, before = saved
    dcp_to_torch_save(path, tmp_path / "all.pt")
    state = torch.load(tmp_path / "all.pt", weights_only=True)
    for name, values in toy.whole([held for held, _ in before]).items():
        assert torch.equal(state["model"][name], values.pop("weight"))
        assert state["optimizer"].get(name, {}).keys() == values.keys()
        for key, value in values.items():
            assert torch.equal(state["optimizer"][name][key], value)
    assert state["model"].keys() == {*toy.whole([held for held, _ in before]), "offset"}
    assert list(state["rng"]) == ["0", "1", "2", "3"]


def test_equal_rows_are_written_once(saved: tuple[Path, Any]) -> None:
    """Four ranks hold the weights twice (outer, inner); the files hold them once."""
    path, before = saved
    state = toy.whole([held for held, _ in before])
    num_bytes = sum(value.nbytes for values in state.values() for value in values.values())
    on_disk = sum(file.stat().st_size for file in path.glob("*.distcp"))
    assert num_bytes < on_disk < num_bytes + 150_000, "more than headers and generators"


def _save_replicas(folder: Path) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Embedding(2053, 515), nn.Linear(5, 3), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    save(folder, 1, model=model, optimizer=optimizer, counters={})
    return {name: value.detach() for name, value in model.named_parameters()}


def test_replicas_divide_the_writing(ranks: RankPool, tmp_path: Path) -> None:
    before, _ = ranks.run(2, _save_replicas, tmp_path)
    path = tmp_path / "step-00000001"
    sizes = [(path / f"__{rank}_0.distcp").stat().st_size for rank in range(2)]
    assert 2053 * 515 * 2 < min(sizes) and max(sizes) < 1.01 * min(sizes) + 10_000
    weights = CheckpointWeights(path)
    assert weights.shapes() == {name: value.shape for name, value in before.items()}
    for name, value in before.items():
        assert torch.equal(weights.rows(name, 0, len(value)), value)
        assert torch.equal(weights.rows(name, 1, len(value)), value[1:])
