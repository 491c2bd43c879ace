"""A scripted engine behind the seam: no model, but queues, steps, stop strings, failures."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shoal.data.tokenizer import Tokenizer, load_tokenizer
from shoal.errors import Overloaded, ShoalError
from shoal.inference import ChoiceText, Limits, Output, Request, Stats, TokenLogprob, TokenTexts
from shoal.inference.journal import JournalStats
from shoal_deployments.engine_client import (
    EngineUnavailable,
    ModelCard,
    ReplicaHealth,
    ReplicaStats,
    other_fingerprint,
)
from shoal_deployments.mailbox import Mailbox

LETTERS = b"abcdefghijklmnopqrstuvwxyz "

NextToken = Callable[[Request, int, int], int]
"""(request, choice, position) to the token there."""


def by_hash(request: Request, choice: int, position: int) -> int:
    """A letter that depends on prompt, seed, choice and position alone."""
    if request.params.logit_bias:
        # The ids with the most bias, one after the other.
        wanted = [token for token, bias in request.params.logit_bias if bias == 100]
        if wanted:
            return wanted[position % len(wanted)]
    seed = 0 if request.params.is_greedy else request.seed
    key = repr((request.prompt, seed, choice, position)).encode()
    return LETTERS[hashlib.sha256(key).digest()[0] % len(LETTERS)]


def spelling(text: str, *, ends: bool = False) -> NextToken:
    """The bytes of ``text`` over and over, or once and then end-of-text."""
    data = text.encode()

    def next_token(request: Request, choice: int, position: int) -> int:
        if ends and position == len(data):
            return 256
        return data[position % len(data)]

    return next_token


@dataclass(eq=False)
class _Run:
    """One choice on its way."""

    request: Request
    choice: int
    max_tokens: int
    text: ChoiceText
    mailbox: Mailbox
    tokens: list[int] = field(default_factory=list)


class FakeEngine:
    """One token for each of ``max_running`` choices per step; a step takes ``step_s``.

    ``next_token`` says what is generated, ``alternatives`` what is likely beside it. ``failure`` is
    put into the next step; ``refusal`` is raised by the next submissions; while ``is_stalled``
    nothing moves. ``durable_problem`` is what durable requests end with.
    """

    def __init__(self, tokenizer: Tokenizer | None = None, limits: Limits | None = None) -> None:
        self.tokenizer = tokenizer or load_tokenizer("bytes")
        limits = limits or Limits(
            vocab_size=257, context_length=512, num_blocks=256, block_size=4, max_waiting=64
        )
        self.card = ModelCard(name="tiny", created=1_700_000_000, limits=limits, weights="w1")
        self.next_token: NextToken = by_hash
        self.alternatives: Sequence[int] = (120, 121, 122, 119)
        self.step_s = 0.0
        self.submit_s = 0.0
        self.is_stalled = False
        self.failure: str | ShoalError | None = None
        self.refusal: ShoalError | None = None
        self.durable_problem: str | None = None
        self.journal: JournalStats | None = None
        self.fingerprint: str | None = "fp1"
        self.aborted: list[str] = []
        self.num_asked = 0
        self.submitted: list[str] = []
        self.requests: list[Request] = []
        self._runs: list[_Run] = []
        self._dead: set[str] = set()
        self._texts = TokenTexts(self.tokenizer)
        self._finished = self._cancelled = self._steps = self._generated = 0
        self._work = asyncio.Event()
        self._loop_task: asyncio.Task[None] | None = None

    async def submit(
        self, requests: Sequence[Request], mailbox: Mailbox, fingerprint: str | None = None
    ) -> str | None:
        if self._loop_task is None:
            self._loop_task = asyncio.create_task(self._loop(), name="fake engine")
        self.num_asked += 1
        await asyncio.sleep(self.submit_s)
        if self.refusal is not None:
            raise self.refusal
        if fingerprint not in (None, self.fingerprint):
            raise other_fingerprint(fingerprint)
        new = sum(request.params.n for request in requests)
        if len(self._runs) + new > self.card.limits.max_running + self.card.limits.max_waiting:
            raise Overloaded("The queue is full.")
        for request in requests:
            self.submitted.append(request.id)
            self.requests.append(request)
            if request.id not in self._dead:
                self._runs.extend(self._start(request, mailbox))
        self._work.set()
        return self.fingerprint

    def abort(self, request_ids: Sequence[str]) -> None:
        self.aborted.extend(request_ids)
        self._dead.update(request_ids)
        kept = [run for run in self._runs if run.request.id not in self._dead]
        self._cancelled += len(self._runs) - len(kept)
        self._runs = kept

    async def stats(self) -> Sequence[ReplicaStats]:
        if isinstance(self.refusal, EngineUnavailable):
            raise self.refusal
        running = min(len(self._runs), self.card.limits.max_running)
        stats = Stats(
            running=running,
            max_running=self.card.limits.max_running,
            waiting=len(self._runs) - running,
            kv_blocks_total=256,
            kv_blocks_free=256 - running,
            kv_blocks_cached=0,
            finished=self._finished,
            cancelled=self._cancelled,
            failed=0,
            refused=0,
            preempted=0,
            prefix_hit_tokens=0,
            computed_tokens=self._generated,
            generated_tokens=self._generated,
            steps=self._steps,
        )
        certificate = {"fingerprint": "fp1"}
        return [
            ReplicaStats(replica="0", stats=stats, certificate=certificate, journal=self.journal)
        ]

    async def health(self) -> Sequence[ReplicaHealth]:
        return [ReplicaHealth(replica="0", progresses=not self.is_stalled)]

    @property
    def num_running(self) -> int:
        """Choices that have not ended."""
        return len(self._runs)

    def _start(self, request: Request, mailbox: Mailbox) -> list[_Run]:
        params = request.params
        return [
            _Run(
                request=request,
                choice=choice,
                max_tokens=self.card.limits.check(request),
                text=ChoiceText(self._texts, params.stop, min_tokens=params.min_tokens),
                mailbox=mailbox,
            )
            for choice in range(params.n)
        ]

    async def _loop(self) -> None:
        while True:
            await self._work.wait()
            await asyncio.sleep(self.step_s)
            if not self._runs:
                self._work.clear()
            elif not self.is_stalled:
                self._step()

    def _step(self) -> None:
        self._steps += 1
        outputs: dict[Mailbox, list[Output]] = {}
        failure, self.failure = self.failure, None
        for run in self._runs[: self.card.limits.max_running]:
            if isinstance(failure, ShoalError):
                run.mailbox.fail(failure)
                self._runs.remove(run)
            else:
                outputs.setdefault(run.mailbox, []).append(self._advance(run, failure))
        for mailbox, some in outputs.items():
            mailbox.put(some)

    def _advance(self, run: _Run, failure: str | None) -> Output:
        request, params, position = run.request, run.request.params, len(run.tokens)
        prompt = self._prompt_logprobs(run) if position == 0 else None
        if failure is not None:
            self._runs.remove(run)
            return Output(
                request_id=request.id, choice=run.choice, finish_reason="error", error=failure
            )
        if run.max_tokens == 0:
            return self._end(run, "length", "", (), None, prompt)
        token = self.next_token(request, run.choice, position)
        run.tokens.append(token)
        self._generated += 1
        stops = (() if params.ignore_eos else (256,)) + params.stop_token_ids
        ends = token in stops and len(run.tokens) > params.min_tokens
        delta = run.text.push(token, is_text=not ends)
        logprobs = None
        if params.logprobs is not None:
            entry = _logprob(token, delta.piece, delta.offset, params.logprobs, self.alternatives)
            logprobs = (entry,)
        if delta.stop is not None:
            return self._end(run, "stop", delta.shown, (token,), logprobs, prompt, delta.stop)
        if ends or len(run.tokens) == run.max_tokens:
            shown = delta.shown + run.text.finish().shown
            why = token if ends and token != 256 else None
            reason = "stop" if ends else "length"
            return self._end(run, reason, shown, (token,), logprobs, prompt, why)
        return Output(
            request_id=request.id,
            choice=run.choice,
            token_ids=(token,),
            text=delta.shown,
            logprobs=logprobs,
            prompt_logprobs=prompt,
        )

    def _end(
        self,
        run: _Run,
        reason: str,
        text: str,
        tokens: tuple[int, ...],
        logprobs: tuple[TokenLogprob, ...] | None,
        prompt: tuple[TokenLogprob | None, ...] | None,
        why: int | str | None = None,
    ) -> Output:
        self._runs.remove(run)
        self._finished += 1
        return Output(
            request_id=run.request.id,
            choice=run.choice,
            token_ids=tokens,
            text=text,
            logprobs=logprobs,
            prompt_logprobs=prompt,
            finish_reason=reason,
            stop_reason=why,
            durable=self.durable_problem is None if run.request.durable else None,
            durable_problem=self.durable_problem if run.request.durable else None,
        )

    def _prompt_logprobs(self, run: _Run) -> tuple[TokenLogprob | None, ...] | None:
        count = run.request.params.prompt_logprobs
        if count is None or run.choice != 0:
            return None
        text = ChoiceText(self._texts)
        deltas = [text.push(token) for token in run.request.prompt]
        entries = [
            _logprob(token, delta.piece, delta.offset, count, self.alternatives)
            for token, delta in zip(run.request.prompt, deltas, strict=True)
        ]
        return (None, *entries[1:])


def _logprob(
    token: int, piece: str, offset: int, count: int, alternatives: Sequence[int]
) -> TokenLogprob:
    others = [other for other in alternatives if other != token]
    top = [(token, -0.25), *((other, -1.0 - rank) for rank, other in enumerate(others))]
    return TokenLogprob(
        token=token, logprob=-0.25, text=piece, offset=offset, top=tuple(top[:count])
    )
