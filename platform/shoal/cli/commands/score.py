"""``shoal score``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from shoal.cli.serving import (
    ModelFolder,
    PrecisionOption,
    ThreadsOption,
    check_folder,
    say_loading,
    use_threads,
)
from shoal.errors import ConfigError


def score(
    model: ModelFolder,
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE.jsonl", help='Lines with "tokens" (ids), "prompt" (text) or "messages".'
        ),
    ],
    precision: PrecisionOption = "auto",
    threads: ThreadsOption = None,
) -> None:
    """Give log-probabilities of texts by the training forward: the same bits as the engine's.

    Prints one JSON object per line: the tokens, and the log-probability of each given those before.
    """
    check_folder(model)
    if not file.is_file():
        raise ConfigError("FILE", str(file), "there is no such file", "Give a file of JSON lines")
    say_loading(model)
    # torch takes seconds to load
    from shoal.inference.certify import Subject
    from shoal.inference.forward.precision import resolved_precision
    from shoal.inference.loading import served_tokenizer
    from shoal.inference.score import Scorer

    use_threads(threads)
    lines = list(_lines(file, served_tokenizer(model)))
    decoder = Subject(folder=model, precision=precision).load_decoder()
    scorer = Scorer(decoder, resolved_precision(precision))
    for tokens, logprobs in zip(lines, scorer.score(lines), strict=True):
        typer.echo(json.dumps({"tokens": tokens, "logprobs": [None, *logprobs]}))


# The type of the tokenizer would load torch, and so slow every command down.
def _lines(file: Path, tokenizer: Any) -> Iterator[list[int]]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _tokens(number, line, tokenizer)


def _tokens(number: int, line: str, tokenizer: Any) -> list[int]:
    remedy = 'Give {"tokens": [1, 2]}, {"prompt": "text"} or {"messages": [...]}'
    where = f"line {number}"
    try:
        value: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError("FILE", where, f"it is not valid JSON: {error}", remedy) from error
    if isinstance(value, dict) and isinstance(value.get("prompt"), str):
        return list(tokenizer.encode_prompt(value["prompt"]))
    if isinstance(value, dict) and isinstance(value.get("messages"), list):
        return list(tokenizer.encode_chat(value["messages"]).tokens)
    tokens = value.get("tokens") if isinstance(value, dict) else None
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise ConfigError("FILE", where, "it has nothing to score", remedy)
    return tokens
