"""A real model: SmolLM2 against ``transformers``, token by token, and asked a question."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shoal.config import ServeSettings
from shoal.inference import Request, SamplingParams
from shoal.inference.engine import Engine
from shoal.inference.loading import load_engine, served_tokenizer
from shoal.inference.offline import joined, stream
from shoal.models import import_model
from tests.inference.beginnings import PROMPTS

NUM_TOKENS = 32


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smollm2") / "model"
    import_model("smollm2", folder)
    return folder


def engine_of(folder: Path, precision: str) -> Engine:
    return load_engine(
        folder, ServeSettings.model_validate({"precision": precision, "kv": {"tokens": 8192}})
    )


def test_greedy_tokens_equal_transformers(smollm2: Path) -> None:
    import transformers

    engine, tokenizer = engine_of(smollm2, "fp32"), served_tokenizer(smollm2)
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    prompts = {str(number): tokenizer.encode(text) for number, text in enumerate(PROMPTS[:8])}
    for name, tokens in prompts.items():
        engine.add(Request(id=name, prompt=tuple(tokens), params=params))
    found = {name: list(tokens) for name, tokens in prompts.items()}
    while engine.has_work:
        for output in engine.step():
            found[output.request_id] += output.token_ids
    theirs = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    for name, tokens in prompts.items():
        expected = theirs.generate(
            torch.tensor([tokens]), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None
        )
        assert found[name] == expected[0].tolist(), name


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_capital_of_france(precision: str, smollm2: Path) -> None:
    question = {"role": "user", "content": "What is the capital of France?"}
    prompt = tuple(served_tokenizer(smollm2).apply_chat_template([question]))
    params = SamplingParams(max_tokens=16, temperature=0.0)
    outputs = stream(engine_of(smollm2, precision), Request(id="a", prompt=prompt, params=params))
    (answer,) = joined(list(outputs))
    assert answer.text == "The capital of France is Paris."
    assert answer.finish_reason == "stop"
