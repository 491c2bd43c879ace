"""A real model: SmolLM2 against ``transformers``, token by token, and asked a question."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

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
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    assert len(prompts) == 20
    for number, tokens in enumerate(prompts):
        engine.add(Request(id=str(number), prompt=tuple(tokens), params=params))
    found = [list(tokens) for tokens in prompts]
    while engine.has_work:
        for output in engine.step():
            found[int(output.request_id)] += output.token_ids
    # One pass over prompts and answers instead of one a token: the greedy answers are the same if
    # each token of ours is what they find likeliest after those before it. Padding is never seen.
    theirs = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    lines = pad_sequence([torch.tensor(line) for line in found], batch_first=True)
    with torch.inference_mode():
        likeliest = theirs(lines).logits.argmax(dim=2)
    for number, (tokens, line) in enumerate(zip(prompts, found, strict=True)):
        assert len(line) == len(tokens) + NUM_TOKENS
        expected = likeliest[number, len(tokens) - 1 : len(line) - 1].tolist()
        assert line[len(tokens) :] == expected, PROMPTS[number]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_capital_of_france(precision: str, smollm2: Path) -> None:
    question = {"role": "user", "content": "What is the capital of France?"}
    prompt = tuple(served_tokenizer(smollm2).apply_chat_template([question]))
    params = SamplingParams(max_tokens=16, temperature=0.0)
    outputs = stream(engine_of(smollm2, precision), Request(id="a", prompt=prompt, params=params))
    (answer,) = joined(list(outputs))
    assert answer.text == "The capital of France is Paris."
    assert answer.finish_reason == "stop"
