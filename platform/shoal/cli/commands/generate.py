"""``shoal generate``."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated, Any

import typer

from shoal.cli.serving import (
    ModelFolder,
    PrecisionOption,
    ThreadsOption,
    check_folder,
    use_threads,
)


def generate(
    model: ModelFolder,
    prompt: Annotated[str, typer.Option(help="Text to go on from; with --chat, a question.")],
    chat: Annotated[
        bool, typer.Option("--chat", help="Let the model's chat template ask the prompt.")
    ] = False,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep tokens up to this probability.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Keep tokens this likely beside the best.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Unset: another answer each time.")] = None,
    n: Annotated[int, typer.Option("--n", help="Answers.")] = 1,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends an answer; may be given again.")
    ] = None,
    logprobs: Annotated[
        int | None, typer.Option(help="With --json: this many likeliest tokens of each step.")
    ] = None,
    precision: PrecisionOption = "auto",
    threads: ThreadsOption = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object at the end, not the text.")
    ] = False,
) -> None:
    """Generate text in this process, by the engine that serves: the same bits."""
    check_folder(model)
    # torch takes seconds to load
    from shoal.config import ServeSettings
    from shoal.inference import Request, SamplingParams
    from shoal.inference.loading import load_engine, served_tokenizer
    from shoal.inference.offline import joined, stream

    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        n=n,
        stop=tuple(stop or ()),
        logprobs=logprobs,
    )
    use_threads(threads)
    tokenizer = served_tokenizer(model)
    if chat:
        tokens = tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
    else:
        tokens = tokenizer.encode_prompt(prompt)
    engine = load_engine(model, ServeSettings(precision=precision))
    outputs = []
    for output in stream(engine, Request(id="generate", prompt=tuple(tokens), params=params)):
        outputs.append(output)
        if n == 1 and not as_json:
            typer.echo(output.text, nl=False)
    answers = joined(outputs)
    if as_json:
        typer.echo(json.dumps(_report(tokens, answers, engine.model.kind), indent=2))
    elif n == 1:
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
