"""``POST /v1/completions``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.inference.params import SamplingParams
from shoal.inference.text import TokenNames
from shoal_deployments.openai.answers import Choice
from shoal_deployments.openai.endpoint import Endpoint, PromptTokens
from shoal_deployments.openai.logprobs import completion_logprobs, prompt_logprobs
from shoal_deployments.openai.requests import CompletionBody
from shoal_deployments.openai.sampling import completion_params
from shoal_deployments.openai.unsupported import refuse_best_of
from shoal_deployments.openai.writer import Chunk, Header, Writer, ending_of
from shoal_deployments.tokenizing import Tokenizing


class Completions(Endpoint[CompletionBody]):
    """Goes on with one text or several."""

    body_type = CompletionBody
    id_prefix = "cmpl"

    def params(self, body: CompletionBody) -> SamplingParams:
        refuse_best_of(body.best_of, body.num_choices)
        return completion_params(body)

    def field_names(self, body: CompletionBody) -> Mapping[str, str]:
        return {"prompt_logprobs": "logprobs"}

    async def prompts(self, body: CompletionBody, tokenizing: Tokenizing) -> list[PromptTokens]:
        texts = [prompt for prompt in body.prompt if isinstance(prompt, str)]
        if not texts:
            return [PromptTokens(ids=ids) for ids in body.prompt]
        encoded = await tokenizing.encode(texts)
        return [PromptTokens(ids=ids, text=text) for ids, text in zip(encoded, texts, strict=True)]

    async def writer(
        self,
        header: Header,
        body: CompletionBody,
        prompts: Sequence[PromptTokens],
        tokenizing: Tokenizing,
    ) -> Writer:
        texts: list[str] = []
        if body.echo and body.logprobs is None:
            for prompt in prompts:
                given = prompt.text
                texts.append(await tokenizing.decode(prompt.ids) if given is None else given)
        return CompletionWriter(header, body, prompts, texts, tokenizing.names)


@dataclass(frozen=True, kw_only=True, slots=True)
class Echo:
    """What each choice of one prompt begins with."""

    text: str
    logprobs: dict[str, list[Any]] | None


class CompletionWriter(Writer):
    """``text_completion``, whole and in chunks.

    With ``echo`` a choice begins with its prompt. Where log-probabilities are asked for, the
    engine gives the prompt's pieces with the first choice, and what comes for the others before
    then is held back.
    """

    kind = "text_completion"
    chunk_kind = "text_completion"

    def __init__(
        self,
        header: Header,
        body: CompletionBody,
        prompts: Sequence[PromptTokens],
        texts: Sequence[str],
        names: TokenNames,
    ) -> None:
        """``texts`` are the prompts' where they are repeated without log-probabilities."""
        super().__init__(header, includes_usage=body.includes_usage)
        self._has_logprobs = body.logprobs is not None
        self._has_token_ids = bool(body.return_token_ids)
        self._repeats_prompt = bool(body.echo)
        self._prompts = prompts
        self._names = names
        self._echoes = {place: Echo(text=text, logprobs=None) for place, text in enumerate(texts)}
        self._held: list[Choice] = []
        self._begun: set[int] = set()

    def opening(self, choices: Sequence[Choice]) -> list[Chunk]:
        return []

    def chunks(self, added: Sequence[Choice]) -> list[Chunk]:
        released = self._released(added)
        return [Chunk(choice=choice, content=self._content(choice)) for choice in released]

    def _content(self, choice: Choice) -> dict[str, Any] | None:
        # Half a character has no text yet, but a log-probability and an id of its own.
        begins = choice.index not in self._begun and self._repeats_prompt
        has_more = begins or self._has_logprobs or self._has_token_ids
        if choice.text or choice.finish_reason or has_more:
            return self._chunk(self._written(choice))
        return None

    def whole(self, choices: Sequence[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        written = [self._written(choice) for choice in self._released(choices)]
        return self._object(self.kind, written) | {"usage": usage}

    def _released(self, added: Sequence[Choice]) -> list[Choice]:
        """What may be written now, in the order in which it came."""
        for choice in added:
            if choice.prompt_logprobs is not None:
                self._echoes[choice.prompt] = self._echo(choice)
        waiting = [*self._held, *added]
        if not self._repeats_prompt:
            return waiting
        self._held = [choice for choice in waiting if choice.prompt not in self._echoes]
        return [choice for choice in waiting if choice.prompt in self._echoes]

    def _echo(self, choice: Choice) -> Echo:
        entries = choice.prompt_logprobs
        assert entries is not None
        rest = [entry for entry in entries if entry is not None]
        # The first token's text ends where the second's begins: nowhere, inside a character.
        first = self._names.piece(self._prompts[choice.prompt].ids[0])
        first = first[: rest[0].offset] if rest else first
        text = first + "".join(entry.text for entry in rest)
        return Echo(text=text, logprobs=prompt_logprobs(first, rest, self._names))

    def _written(self, choice: Choice) -> dict[str, Any]:
        echo = self._echoes.get(choice.prompt) if self._repeats_prompt else None
        begins = choice.index not in self._begun
        self._begun.add(choice.index)
        logprobs = None
        if self._has_logprobs:
            start = len(echo.text) if echo else 0
            logprobs = completion_logprobs(choice.logprobs or (), start, self._names)
            if begins and echo and echo.logprobs:
                logprobs = {name: echo.logprobs[name] + logprobs[name] for name in logprobs}
        written: dict[str, Any] = {
            "index": choice.index,
            "text": echo.text + choice.text if begins and echo else choice.text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
        }
        written |= ending_of(choice)
        if self._has_token_ids:
            written["token_ids"] = choice.token_ids
            if begins:
                written["prompt_token_ids"] = self._prompts[choice.prompt].ids
        return written
