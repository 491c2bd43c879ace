"""What the engines gave so far, choice by choice, in the order of the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from shoal.inference.protocol import Output, TokenLogprob
from shoal.inference.request import Request
from shoal_deployments.engine_client import EngineFailed
from shoal_deployments.openai.pieces import Pieces


@dataclass(kw_only=True, slots=True)
class Choice:
    """One choice, or what was added to it since the last time."""

    index: int
    """Place in the answer: choices of the first prompt first."""

    prompt: int
    """Place of its prompt in the request."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None

    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """Come once, with the first choice of each prompt."""

    finish_reason: str | None = None
    """``stop`` or ``length`` once it has ended."""

    stop_reason: int | str | None = None

    durable: bool | None = None
    """Whether its tokens are in the journal, where that was asked."""

    durable_problem: str | None = None

    is_known: bool = False
    """Whether the client has this from before its stream broke."""

    def add(self, more: Output | Choice) -> None:
        """Append what came next."""
        self.text += more.text
        self.token_ids.extend(more.token_ids)
        if more.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs.extend(more.logprobs)
        if more.prompt_logprobs is not None:
            self.prompt_logprobs = more.prompt_logprobs
        self.finish_reason = more.finish_reason
        self.stop_reason = more.stop_reason
        self.durable, self.durable_problem = more.durable, more.durable_problem


class Answers:
    """Sorts the outputs of the requests of one client and counts what they used."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = tuple(requests)
        self._places = {request.id: place for place, request in enumerate(requests)}
        self._num_choices = requests[0].params.n
        self._unfinished = {request.id: set(range(self._num_choices)) for request in self._requests}
        has_logprobs = requests[0].params.logprobs is not None
        num_pieces = len(requests) * self._num_choices if has_logprobs else 0
        self._pieces = {index: Pieces() for index in range(num_pieces)}
        self._cached = [0] * len(requests)
        self.num_generated = 0
        """Tokens of all choices."""

    @property
    def unfinished_ids(self) -> list[str]:
        """Requests of which a choice has not ended."""
        return [name for name, choices in self._unfinished.items() if choices]

    def blank_choices(self) -> list[Choice]:
        """All choices of all prompts, empty."""
        count = self._num_choices
        total = count * len(self._requests)
        return [Choice(index=index, prompt=index // count) for index in range(total)]

    @property
    def num_prompt(self) -> int:
        """Tokens of all prompts; a prompt counts once, however many choices it has."""
        return sum(len(request.prompt) for request in self._requests)

    @property
    def num_cached(self) -> int:
        """Tokens of all prompts that were not computed again."""
        return sum(self._cached)

    def index_of(self, output: Output) -> int:
        """The choice, by its place in the answer, that ``output`` belongs to."""
        return self._places[output.request_id] * self._num_choices + output.choice

    def absorb(self, outputs: Sequence[Output], *, are_known: bool = False) -> list[Choice]:
        """What ``outputs`` add to each choice, in the order of the answer.

        Raises EngineFailed where a step failed.
        """
        added: dict[int, Choice] = {}
        for output in outputs:
            place = self._places[output.request_id]
            if output.finish_reason is not None:
                self._end(output)
            index = self.index_of(output)
            if index not in added:
                added[index] = Choice(index=index, prompt=place, is_known=are_known)
            if index in self._pieces:
                output = replace(output, logprobs=self._pieces[index].take(output))
            added[index].add(output)
            self.num_generated += len(output.token_ids)
            if output.choice == 0:
                self._cached[place] = max(self._cached[place], output.num_cached_tokens)
        return [added[index] for index in sorted(added)]

    def _end(self, output: Output) -> None:
        self._unfinished[output.request_id].discard(output.choice)
        if output.finish_reason == "error":
            raise EngineFailed(output.error or "A step of the engine failed.")
