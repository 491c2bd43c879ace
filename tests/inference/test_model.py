"""The served model: against ``transformers``, against the trainer's decoder, and against itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.errors import ConfigError
from shoal.inference import Limits, Request, SamplingParams
from shoal.inference.engine import Engine
from shoal.inference.forward.model import ServedModel
from shoal.models import Decoder, DecoderConfig, load_weights, parameter_shapes
from shoal.ops import fixed
from shoal.ops.fixed.kernel import LAUNCHES, Launch
from shoal.ops.fixed_order import fixed_order
from tests.inference.small_models import RandomWeights, random_model, rows_of
from tests.models.oracle import reference, relative
from tests.models.tiny import SERVED, TINY

KINDS: tuple[fixed.Kind, ...] = ("fp32", "bf16", "mxfp8")
PROMPTS = [list(range(3, 3 + length)) for length in (1, 16, 37, 5)]


def logits_of(model: ServedModel, sequences: list[list[int]]) -> list[torch.Tensor]:
    cache = model.new_cache(8 * len(sequences), 16)
    rows = model.logits(model.forward(rows_of(sequences), cache))
    return list(rows.split([len(tokens) for tokens in sequences]))


@pytest.mark.parametrize("name", SERVED)
def test_greedy_tokens_equal_transformers(name: str, tmp_path: Path) -> None:
    theirs = reference(TINY[name])
    theirs.save_pretrained(tmp_path)
    model = ServedModel.load(tmp_path, "fp32")
    for prompt in PROMPTS:
        expected = theirs(torch.tensor([prompt])).logits[0]
        (ours,) = logits_of(model, [prompt])
        assert relative(ours, expected) < 1e-5
    tokens = PROMPTS[1]
    expected = theirs.generate(
        torch.tensor([tokens]), max_new_tokens=12, do_sample=False, eos_token_id=None
    )[0].tolist()
    cache = model.new_cache(8, 16)
    found = list(tokens)
    hidden = model.forward(rows_of([tokens]), cache)[-1:]
    while len(found) < len(expected):
        found.append(int(model.logits(hidden).argmax()))
        hidden = model.forward(rows_of([found[-1:]], len(found) - 1), cache)
    assert found == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SERVED)
def test_a_row_has_the_bits_of_the_decoder_and_of_itself_alone(name: str, kind: fixed.Kind) -> None:
    model = random_model(TINY[name], kind)
    together = logits_of(model, PROMPTS)
    decoder = Decoder(DecoderConfig.from_hf(TINY[name]), model.dtype).eval()
    load_weights(decoder, RandomWeights(parameter_shapes(model.config)))
    for prompt, rows in zip(PROMPTS, together, strict=True):
        (alone,) = logits_of(model, [prompt])
        assert torch.equal(alone, rows)
        with fixed_order(kind):
            trained = decoder(torch.tensor([prompt])).logits
        assert trained is not None and torch.equal(trained[0], rows)


@pytest.mark.parametrize("name", ["qwen2", "qwen2_moe"])
def test_chunks_and_wanted_rows_change_no_bit(name: str) -> None:
    model = random_model(TINY[name], "bf16")
    tokens = PROMPTS[2]
    (whole,) = logits_of(model, [tokens])
    for size in (1, 2, 16, 36):
        cache = model.new_cache(8, 16)
        for start in range(0, len(tokens), size):
            rows = rows_of([tokens[start : start + size]], start)
            last = torch.tensor([rows.tokens.shape[0] - 1])
            hidden = model.forward(rows, cache, last)
            at = start + int(last)
            assert torch.equal(model.logits(hidden), whole[at : at + 1])


def test_bf16_is_close_to_fp32_and_mxfp8_not_far() -> None:
    hf: dict[str, Any] = TINY["qwen3"]
    (expected,) = logits_of(random_model(hf, "fp32"), PROMPTS[2:3])
    (bf16,) = logits_of(random_model(hf, "bf16"), PROMPTS[2:3])
    (mxfp8,) = logits_of(random_model(hf, "mxfp8"), PROMPTS[2:3])
    assert 0 < relative(bf16, expected) < 0.02
    assert relative(bf16, expected) < relative(mxfp8, expected) < 0.2


def launched(work: Callable[[], object]) -> set[str]:
    """Names of the kernels that ``work`` runs."""
    launches: list[Launch] = []
    token = LAUNCHES.set(launches)
    try:
        work()
    finally:
        LAUNCHES.reset(token)
    return {launch.kernel for launch in launches}


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, "bf16") for name in SERVED), ("qwen2_moe", "fp32"), ("qwen2_moe", "mxfp8")],
)
def test_every_kernel_that_the_engine_runs_is_proven(name: str, kind: fixed.Kind) -> None:
    model = random_model(TINY[name], kind)
    certificates = []
    proven = launched(lambda: certificates.append(model.certify(16)))
    assert certificates[0].passed, certificates[0].failures
    params = SamplingParams(max_tokens=2, logprobs=1, prompt_logprobs=1, ignore_eos=True)
    limits = Limits(vocab_size=model.config.vocab_size, context_length=64, num_blocks=4)
    engine = Engine(model, limits)
    engine.add(Request(id="1", prompt=(3, 4, 5, 6), params=params))
    missing = launched(engine.step) - proven
    assert not missing, f"there is no probe of {missing}"
    assert {"linear_fp32" if kind == "fp32" else "linear_bf16", "place_heads"} <= proven


@pytest.mark.parametrize("name", ["llama3", "qwen2_moe"])
def test_without_the_promise_results_are_close_and_nothing_is_claimed(name: str) -> None:
    config = DecoderConfig.from_hf(TINY[name])
    weights = RandomWeights(parameter_shapes(config))
    bounds: dict[fixed.Kind, float] = {"fp32": 1e-5, "bf16": 0.02}
    for kind, bound in bounds.items():
        model = ServedModel(config, weights, kind, batch_invariant=False)
        (found,) = logits_of(model, PROMPTS[2:3])
        (expected,) = logits_of(random_model(TINY[name], kind), PROMPTS[2:3])
        assert relative(found, expected) < bound
        certificate = model.certify()
        assert not certificate.passed and "switched off" in certificate.failures[0]
    with pytest.raises(ConfigError, match="MXFP8"):
        ServedModel(config, weights, "mxfp8", batch_invariant=False)


def test_an_unknown_family_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(ConfigError, match="model_type = 'mamba'"):
        ServedModel.load(tmp_path)
