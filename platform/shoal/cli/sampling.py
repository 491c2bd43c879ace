"""Options of a command that draws an answer: those of ``SamplingParams`` that one request heeds.

``shoal.inference.params`` says what each means and checks it, for HTTP's bodies too. It is imported
when the command runs: torch, which comes along, takes seconds to load.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Annotated, Any

import typer

from shoal.errors import ConfigError

OPTIONS: Mapping[str, Any] = {
    "max_tokens": Annotated[int | None, typer.Option(help="Generate at most so many tokens; 256.")],
    "min_tokens": Annotated[
        int | None, typer.Option(help="End it after so many at the earliest; 0.")
    ],
    "n": Annotated[int | None, typer.Option("--n", help="Answers; 1.")],
    "temperature": Annotated[
        float | None,
        typer.Option(help="0 takes the likeliest token; 1, as unset, draws as the model says."),
    ],
    "top_k": Annotated[int | None, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")],
    "top_p": Annotated[
        float | None, typer.Option(help="Keep the likeliest tokens up to this sum; 1.")
    ],
    "min_p": Annotated[
        float | None, typer.Option(help="Keep tokens this likely beside the best; 0.")
    ],
    "repetition_penalty": Annotated[
        float | None, typer.Option(help="Makes tokens of prompt and answer less likely; 1.")
    ],
    "presence_penalty": Annotated[
        float | None, typer.Option(help="Taken from the logits of tokens in the answer; 0.")
    ],
    "frequency_penalty": Annotated[
        float | None, typer.Option(help="Taken once for each time that a token was in it; 0.")
    ],
    "logit_bias": Annotated[
        list[str] | None,
        typer.Option(metavar="ID=BIAS", help="Added to a token's logit; may be given again."),
    ],
    "seed": Annotated[int | None, typer.Option(help="Unset: a different answer each time.")],
    "stop": Annotated[
        list[str] | None, typer.Option(help="Text that ends an answer; may be given again.")
    ],
    "stop_token_ids": Annotated[
        list[int] | None,
        typer.Option("--stop-token-id", help="Token that ends it; may be given again."),
    ],
    "ignore_eos": Annotated[
        bool | None, typer.Option("--ignore-eos", help="Go on after the model's end-of-text.")
    ],
    "logprobs": Annotated[
        int | None, typer.Option(help="With --json: this many likeliest tokens of each step.")
    ],
}
"""By the field that an option sets; one that is not given keeps the field's default."""

Sampling = dict[str, Any]
"""Values for ``SamplingParams``, by name; only those that were given."""


def takes_sampling(command: Callable[..., None]) -> Callable[..., None]:
    """``command`` with all ``OPTIONS`` in the place of its parameter ``sampling``."""

    @wraps(command)
    def run(**given: Any) -> None:
        values = {name: given.pop(name) for name in OPTIONS}
        command(**given, sampling=_sampling(values))

    by_name = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        parameter.replace(kind=by_name)
        for name, parameter in inspect.signature(command, eval_str=True).parameters.items()
        if name != "sampling"
    ]
    parameters += [
        inspect.Parameter(name, by_name, default=None, annotation=kind)
        for name, kind in OPTIONS.items()
    ]
    # Where typer looks for what a command takes.
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def _sampling(values: Mapping[str, Any]) -> Sampling:
    given = {name: value for name, value in values.items() if value not in (None, [])}
    if "logit_bias" in given:
        given["logit_bias"] = _biases(given["logit_bias"])
    for name in ("stop", "stop_token_ids"):
        if name in given:
            given[name] = tuple(given[name])
    return given


def _biases(texts: Sequence[str]) -> tuple[tuple[int, float], ...]:
    biases = []
    for text in texts:
        token, _, bias = text.partition("=")
        try:
            pair = int(token), float(bias)
        except ValueError:
            pair = 0, math.nan
        if not math.isfinite(pair[1]):
            problem, remedy = "it is no pair of token id and bias", "Write such as 13=-100"
            raise ConfigError("--logit-bias", text, problem, remedy)
        biases.append(pair)
    return tuple(biases)
