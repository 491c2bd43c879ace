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
        problem = "it is a folder" if file.is_dir() else "there is no such file"
        raise ConfigError("FILE", str(file), problem, "Give a file of JSON lines")
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
    for (_, tokens), logprobs in zip(lines, scorer.score(lines), strict=True):
        typer.echo(json.dumps({"tokens": tokens, "logprobs": [None, *logprobs]}))


# The type of the tokenizer would load torch, and so slow every command down.
def _lines(file: Path, tokenizer: Any) -> Iterator[tuple[int, list[int]]]:
    """The number and the tokens of each line that is not blank."""
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                where = f"line {number}"
                text = _text(where, line)
                if text.strip():
                    yield number, _tokens(where, _value(where, text), tokenizer)
    except OSError as error:
        problem = f"it cannot be read: {error.strerror}"
        raise ConfigError("FILE", str(file), problem, "Make the file readable") from error


def _text(where: str, line: bytes) -> str:
    try:
        # Some editors write a mark before the first line, which is no part of it.
        return line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        problem, remedy = f"it is not UTF-8: {error}", "Save the file as plain UTF-8 text"
        raise ConfigError("FILE", where, problem, remedy) from error


def _value(where: str, text: str) -> Any:
    remedy = "Mend or remove the line"
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError("FILE", where, f"it is not valid JSON: {error}", remedy) from error
    except RecursionError:
        raise ConfigError("FILE", where, "it is nested too deeply", remedy) from None


def _tokens(where: str, value: Any, tokenizer: Any) -> list[int]:
    if isinstance(value, dict) and isinstance(value.get("prompt"), str):
        return list(tokenizer.encode_prompt(value["prompt"]))
    if isinstance(value, dict) and isinstance(value.get("messages"), list):
        try:
            return list(tokenizer.encode_chat(value["messages"]).tokens)
        except ConfigError as error:
            if error.field != "messages":
                raise
            raise ConfigError("FILE", f"{where}, messages", error.problem, error.remedy) from error
    tokens = value.get("tokens") if isinstance(value, dict) else None
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        remedy = 'Give {"tokens": [1, 2]}, {"prompt": "text"} or {"messages": [...]}'
        raise ConfigError("FILE", where, "it has nothing to score", remedy)
    return tokens
