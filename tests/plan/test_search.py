"""The search for layouts: against looking at every one, and against plans of what it finds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shoal.config import Config, config_from_tree
from shoal.config.overrides import apply_overrides
from shoal.errors import ConfigError
from shoal.plan import Found, Machine, Rates, gpu_rates, make_plan, search, search_sheets
from shoal.plan.candidates import Reasons, candidates
from shoal.plan.model import read_decoder_config
from shoal.plan.search_sheets import found_as_dict, settings_text
from shoal.plan.sheet import bytes_text
from shoal.plan.table import plain
from tests.plan.configs import EXPERTS, config

GPU = Machine.with_gpus()
H100 = gpu_rates("H100")
LARGE = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 8192,
    "intermediate_size": 28_672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}


def _settings(**sections: dict[str, Any]) -> Config:
    base: dict[str, dict[str, Any]] = {
        "cluster": {"device": "cuda"},
        "precision": {"compute": "bf16"},
    }
    return config(
        **{key: {**base.get(key, {}), **sections.get(key, {})} for key in base | sections}
    )


def _search(settings: Config, *, rates: Rates = H100, memory: int = 2**40, most: int = 3) -> Found:
    return search(settings, GPU, rates, memory_bytes=memory, most=most)


def test_no_layout_is_faster_than_the_best() -> None:
    settings = _settings(
        model={"config": {**EXPERTS, "num_experts": 2}},
        cluster={"workers": 4, "nvlink_domain": 2, "device": "cuda"},
        train={"global_batch": 8},
    )
    decoder = read_decoder_config(settings.model)
    families = candidates(settings, decoder, 2, Reasons())
    every = [
        make_plan(candidate.apply(settings), GPU, rates=H100)
        for family in families
        for candidate in family
    ]
    peaks = sorted(plan.fullest.peak for plan in every)
    for memory in (peaks[len(peaks) // 4], peaks[-1]):
        fitting = [plan for plan in every if plan.fullest.peak <= memory]
        seconds = sorted(plan.time.total_s for plan in fitting if plan.time is not None)
        found = _search(settings, memory=memory)
        assert found.num_candidates == len(every) > 150
        best = [plan.time.total_s for _, plan in found.best if plan.time is not None]
        assert best == pytest.approx(seconds[:3])
        assert found.num_slower > 0


@pytest.mark.parametrize("parallel", [{}, {"context": 2, "context_exchange": "ring"}])
def test_the_best_is_what_a_plan_of_it_says(parallel: dict[str, Any]) -> None:
    tree: dict[str, Any] = _settings(
        model={"config": {**EXPERTS, "num_experts": 8}},
        cluster={"workers": 16, "nvlink_domain": 8, "device": "cuda"},
        parallel=parallel,
        train={"global_batch": 32},
    ).model_dump(mode="json")
    settings = config_from_tree(tree)
    found = _search(settings)
    for candidate, plan in found.best:
        words = settings_text(candidate, settings).split(" ")
        assert set(words[::2]) == {"--set"}
        overridden = config_from_tree(tree).model_dump(mode="json")
        apply_overrides(overridden, words[1::2])
        again = make_plan(config_from_tree(overridden), GPU, rates=H100)
        assert again.saves is not None  # which a search does not count
        assert replace(again, saves=None).as_dict() == plan.as_dict()
    shown = [plain(sheet) for sheet in search_sheets(found, settings)]
    best = found.best[0]
    assert best[0].words in shown[0] and "Time of a step" in shown[1]
    assert settings_text(best[0], settings) in shown[-1]
    made = found_as_dict(found, settings)
    assert made["best"][0]["peak_bytes"] == best[1].fullest.peak
    assert made["best"][0]["layout"]["cluster.workers"] == 16


def test_refusals_are_told_by_reason() -> None:
    settings = _settings(
        model={"config": {**EXPERTS, "num_experts": 6}},
        cluster={"workers": 16, "nvlink_domain": 8, "device": "cuda"},
        train={"global_batch": 16},
        data={"seq_len": 8},
    )
    found = _search(settings)
    told = "\n".join(example for _, _, example in found.reasons.rows())
    assert "the model's 6 experts do not divide into 4 equal parts" in told
    assert "4 runs of layers are more than the model's 3 layers" in told
    assert "does not divide into microbatches" in told
    assert "it is cut into 16 chunks" in told
    assert "would reach across" in told
    assert sum(count for _, count, _ in found.reasons.rows()) > 100


def test_what_fits_nowhere_is_refused_with_the_least_that_is_needed() -> None:
    settings = _settings(cluster={"workers": 2, "device": "cuda"})
    least = min(
        make_plan(c.apply(settings), GPU).fullest.peak
        for family in candidates(settings, read_decoder_config(settings.model), None, Reasons())
        for c in family
    )
    with pytest.raises(ConfigError, match="none of .* fits into memory") as refused:
        _search(settings, memory=2**17)
    assert f"a step takes {bytes_text(least)} of 128 KiB" in str(refused.value)


def test_a_number_of_workers_without_any_layout_is_not_laid_to_memory() -> None:
    settings = _settings(cluster={"workers": 5, "device": "cuda"}, train={"global_batch": 4})
    with pytest.raises(ConfigError, match=r"workers = 5: no layout fits: .*does not divide"):
        _search(settings)


def test_what_is_wrong_with_the_run_itself_is_refused_as_ever() -> None:
    settings = _settings(
        cluster={"workers": 2, "device": "cuda"}, parallel={"pipeline": 7}, data={"seq_len": 1000}
    )
    with pytest.raises(ConfigError) as refused:
        _search(settings)
    assert refused.value.field == "data.seq_len"
    assert "parallel" not in str(refused.value), "the file's layout does not matter"


def test_domains_are_as_large_as_fast_links_and_workers_allow() -> None:
    found = _search(_settings(cluster={"workers": 24, "device": "cuda"}))
    assert {candidate.topology.domain for candidate, _ in found.best} == {8}
    found = _search(_settings(cluster={"workers": 20, "device": "cuda"}))
    assert {candidate.topology.domain for candidate, _ in found.best} == {5}


def test_16384_gpus_are_searched() -> None:
    settings = _settings(
        model={"config": LARGE},
        cluster={"workers": 16_384, "device": "cuda"},
        data={"seq_len": 8192},
        train={"global_batch": 16_384},
    )
    found = _search(settings, memory=H100.memory_bytes or 0)
    assert len(found.best) == 3 and found.num_candidates > 1000
    assert all(plan.fullest.peak < 72e9 for _, plan in found.best)
