"""``shoal generate``, ``shoal score`` and ``shoal certify`` on a small model that speaks bytes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from shoal.cli.sampling import OPTIONS
from shoal.inference import SamplingParams
from tests.cli.shell import complaints, shoal, shoal_here
from tests.data.tiny import write_tokenizer
from tests.inference.small_models import random_folder
from tests.models.tiny import TINY


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_folder(
        TINY["qwen3_moe"] | {"num_hidden_layers": 1}, tmp_path_factory.mktemp("m") / "model"
    )


def test_generate_prints_a_text_that_a_seed_repeats(folder: Path) -> None:
    arguments = ("generate", "model", "--prompt", "Once", "--max-tokens", "9", "--seed", "3")
    first = shoal(*arguments, cwd=folder.parent)
    assert (first.returncode, complaints(first)) == (0, [])
    second = shoal_here(*arguments, cwd=folder.parent)
    assert second.stdout == first.stdout and first.stdout.endswith("\n")
    other = shoal_here(*arguments[:-1], "4", cwd=folder.parent)
    assert other.stdout != first.stdout


def test_generate_and_score_agree_to_the_bit(folder: Path) -> None:
    for chat in ((), ("--chat",)):
        arguments = ("--prompt", "Once", "--max-tokens", "9", "--n", "2", "--logprobs", "0")
        result = shoal_here("generate", "model", *arguments, *chat, "--json", cwd=folder.parent)
        report = json.loads(result.stdout)
        prompt = report["prompt_token_ids"]
        lines = [{"tokens": prompt + choice["token_ids"]} for choice in report["choices"]]
        (folder.parent / "lines.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
        result = shoal_here("score", "model", "lines.jsonl", cwd=folder.parent)
        assert (result.returncode, complaints(result)) == (0, [])
        scored = [json.loads(line) for line in result.stdout.splitlines()]
        for choice, line, found in zip(report["choices"], lines, scored, strict=True):
            assert found["tokens"] == line["tokens"] and found["logprobs"][0] is None
            expected = [each["logprob"] for each in choice["logprobs"]]
            assert found["logprobs"][len(prompt) :] == expected


def test_score_takes_texts_and_chats(folder: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    (folder.parent / "texts.jsonl").write_text(f'{{"prompt": "Hi"}}\n\n{json.dumps(chat)}\n')
    result = shoal_here("score", "model", "texts.jsonl", "--precision", "fp32", cwd=folder.parent)
    text, turns = (json.loads(line) for line in result.stdout.splitlines())
    assert text["tokens"] == list(b"Hi") and len(text["logprobs"]) == 2
    assert turns["tokens"][-1] == 256


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"{", ": it is not valid JSON: "),
        (b'{"tokens": [' + b"1" * 5000 + b"]}", ": it is not valid JSON: "),
        (b"[" * 100_000, ": it is nested too deeply. Mend or remove the line."),
        (b'{"prompt": "caf\xe9"}', ": it is not UTF-8: "),
        (b"[]", ": it has nothing to score. "),
        (b'{"tokens": [true]}', ": it has nothing to score. "),
        (b'{"tokens": [999]}', ", 1 tokens': a token is outside the vocabulary"),
        (b'{"tokens": []}', ", 0 tokens': it has no tokens"),
        (b'{"messages": []}', ", messages': it is not a list of at least one message. "),
        (b'{"messages": [{"content": "Hi"}]}', ", messages': message 1 has no role. "),
    ],
)
def test_score_names_a_wrong_line_as_the_file_counts(
    line: bytes, problem: str, folder: Path
) -> None:
    (folder.parent / "wrong.jsonl").write_bytes(b'\n{"tokens": [1, 2]}\n\n' + line)
    result = shoal_here("score", "model", "wrong.jsonl", cwd=folder.parent)
    assert (result.returncode, result.stdout) == (2, "")
    (said,) = complaints(result)
    assert said.startswith("FILE = 'line 4") and problem in said


def test_score_drops_a_mark_before_the_first_line(folder: Path) -> None:
    (folder.parent / "marked.jsonl").write_bytes(b'\xef\xbb\xbf{"tokens": [1, 2]}\r\n')
    result = shoal_here("score", "model", "marked.jsonl", cwd=folder.parent)
    assert result.returncode == 0 and json.loads(result.stdout)["tokens"] == [1, 2]


def test_generate_takes_what_a_request_over_http_may_ask_for(folder: Path) -> None:
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    # The priority is over others, and score has the log-probabilities of a prompt.
    assert OPTIONS.keys() == fields - {"priority", "prompt_logprobs"}
    arguments = (
        *("--logit-bias", "65=100", "--logit-bias", "66=-100", "--max-tokens", "6"),
        *("--repetition-penalty", "1.5", "--ignore-eos", "--min-tokens", "2"),
        *("--stop-token-id", "67", "--stop", "zz", "--frequency-penalty", "-2"),
    )
    result = shoal_here("generate", "model", "--prompt", "Once", *arguments, cwd=folder.parent)
    assert (result.returncode, result.stdout) == (0, "A" * 6 + "\n")
    assert result.stderr.startswith("Loading model, 0 MiB of weights\n")
    ended = shoal_here(
        *("generate", "model", "--prompt", "x", "--logit-bias", "65=100", "--json"),
        *("--stop-token-id", "65", "--min-tokens", "3"),
        cwd=folder.parent,
    )
    (choice,) = json.loads(ended.stdout)["choices"]
    assert 65 not in choice["token_ids"][:3]  # what may not end it yet is not drawn
    assert (choice["token_ids"][3:], choice["finish_reason"]) == ([65], "stop")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("generate", "absent", "--prompt", "x"), "no such folder"),
        (("generate", "model", "--prompt", ""), "it has no tokens"),
        (("generate", "model", "--prompt", "x", "--top-p", "nan"), "top_p"),
        (("generate", "model", "--prompt", "x", "--seed", "-1"), "seed"),
        (("generate", "model", "--prompt", "x", "--logprobs", "1"), "Add --json"),
        (("generate", "model", "--prompt", "x", "--logit-bias", "65"), "--logit-bias = '65'"),
        (("generate", "model", "--prompt", "x", "--logit-bias", "65=nan"), "no pair of token"),
        (("generate", "model", "--prompt", "x", "--logit-bias", "65=101"), "logit_bias = 101"),
        (("generate", "model", "--prompt", "x", "--stop-token-id", "999"), "stop_token_ids = 999"),
        (("generate", "model", "--prompt", "x" * 64), "leaves no room"),
        (("score", "model", "absent.jsonl"), "no such file"),
        (("score", "model", "model"), "it is a folder"),
        (("certify", "absent"), "no such folder"),
        (("generate", ".", "--prompt", "x"), "MODEL = '.': there is no config.json"),
    ],
)
def test_wrong_input_is_one_message(arguments: tuple[str, ...], problem: str, folder: Path) -> None:
    result = shoal_here(*arguments, cwd=folder.parent)
    assert (result.returncode, result.stdout) == (2, "")
    assert problem in result.stderr and "Traceback" not in result.stderr


def test_generate_asks_no_chat_of_a_model_without_a_template(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 1, "vocab_size": 300}
    random_folder(TINY["qwen3_moe"] | sizes, tmp_path / "model")
    write_tokenizer(tmp_path / "model", chat_template=None)
    result = shoal_here("generate", "model", "--prompt", "Hi", "--chat", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert "--chat = True: the model has no chat template. Leave it out" in result.stderr


def test_certify_proves_a_model(folder: Path) -> None:
    result = shoal("certify", "model", "--quick", "--json", cwd=folder.parent)
    assert (result.returncode, complaints(result)) == (0, [])
    proof = json.loads(result.stdout)
    assert proof["holds"] and len(proof["conditions"]) == 9
    assert len(proof["fingerprint"]) == 16
