"""One request on an engine of one's own: what ``shoal generate`` does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shoal.errors import WorkError
from shoal.inference.engine import Engine
from shoal.inference.protocol import Output, TokenLogprob
from shoal.inference.request import Request


def stream(engine: Engine, request: Request) -> Iterator[Output]:
    """The outputs of ``request`` as they come; closing the iterator aborts it.

    The bits are those of serving: it is the same engine, and nobody's answer depends on others.
    Raises ConfigError for a request that cannot be served and WorkError where its work failed.
    """
    engine.add(request)
    missing = request.params.n
    try:
        while missing:
            for output in engine.step():
                if output.error is not None:
                    raise WorkError(f"Choice {output.choice} failed: {output.error}.")
                missing -= output.finish_reason is not None
                yield output
    finally:
        if missing:
            engine.abort(request.id)


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One whole choice."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    """One for each token where they were asked for."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None
    """One for each token of the prompt, with the first choice, where they were asked for."""
    finish_reason: str


def joined(outputs: Sequence[Output]) -> list[Answer]:
    """The whole choices that ``outputs``, all of one request, make, in order of their index."""
    by_choice: dict[int, list[Output]] = {}
    for output in outputs:
        by_choice.setdefault(output.choice, []).append(output)
    return [_answer(by_choice[index]) for index in sorted(by_choice)]


def _answer(outputs: Sequence[Output]) -> Answer:
    logprobs = [each for output in outputs for each in output.logprobs or ()]
    wanted = any(output.logprobs is not None for output in outputs)
    prompt = next((o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None), None)
    return Answer(
        text="".join(output.text for output in outputs),
        token_ids=tuple(token for output in outputs for token in output.token_ids),
        logprobs=tuple(logprobs) if wanted else None,
        prompt_logprobs=prompt,
        finish_reason=outputs[-1].finish_reason or "",
    )
