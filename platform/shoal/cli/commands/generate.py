"""``shoal generate``."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated, Any

import typer

from shoal.cli.sampling import Sampling, takes_sampling
from shoal.cli.serving import (
    ModelFolder,
    PrecisionOption,
    ThreadsOption,
    check_folder,
    say_loading,
    use_threads,
)
from shoal.errors import ConfigError

_MAX_TOKENS = 256


@takes_sampling
def generate(
    model: ModelFolder,
    prompt: Annotated[str, typer.Option(help="Text to continue; with --chat, a question.")],
    sampling: Sampling,
    chat: Annotated[
        bool, typer.Option("--chat", help="Ask the prompt by the model's chat template.")
    ] = False,
    precision: PrecisionOption = "auto",
    threads: ThreadsOption = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object at the end, not the text.")
    ] = False,
) -> None:
    """Generate text in this process, with the engine that serves: the same bits."""
    check_folder(model)
    if "logprobs" in sampling and not as_json:
        problem = "only JSON has room for log-probabilities"
        raise ConfigError("--logprobs", sampling["logprobs"], problem, "Add --json")
    say_loading(model)
    # torch takes seconds to load
    from shoal.config import ServeSettings
    from shoal.inference import Request, SamplingParams
    from shoal.inference.loading import load_engine, served_tokenizer
    from shoal.inference.offline import joined, stream

    params = SamplingParams(**{"max_tokens": _MAX_TOKENS, **sampling})
    use_threads(threads)
    tokenizer = served_tokenizer(model)
    if chat and not tokenizer.has_chat_template:
        problem = "the model has no chat template"
        remedy = "Leave it out, or add chat_template.jinja to the model's folder"
        raise ConfigError("--chat", chat, problem, remedy)
    if chat:
        tokens = tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
    else:
        tokens = tokenizer.encode_prompt(prompt)
    engine = load_engine(model, ServeSettings(precision=precision))
    is_shown_at_once = params.n == 1 and not as_json
    outputs = []
    for output in stream(engine, Request(id="generate", prompt=tuple(tokens), params=params)):
        outputs.append(output)
        if is_shown_at_once:
            typer.echo(output.text, nl=False)
    answers = joined(outputs)
    if as_json:
        typer.echo(json.dumps(_report(tokens, answers, engine.model.kind), indent=2))
    elif is_shown_at_once:
        typer.echo()
    else:
        for index, answer in enumerate(answers):
            typer.echo(f"--- {index} ---\n{answer.text}")


def _report(tokens: list[int], answers: list[Any], precision: str) -> dict[str, Any]:
    choices = [
        {
            "index": index,
            "text": answer.text,
            "token_ids": list(answer.token_ids),
            "finish_reason": answer.finish_reason,
        }
        | (
            {}
            if answer.logprobs is None
            else {"logprobs": [dataclasses.asdict(each) for each in answer.logprobs]}
        )
        for index, answer in enumerate(answers)
    ]
    return {"precision": precision, "prompt_token_ids": tokens, "choices": choices}
