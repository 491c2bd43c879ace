"""One answer on its way to its client: at once when it is complete, or step by step."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from starlette.responses import JSONResponse, Response

from shoal.errors import ShoalError
from shoal.inference.protocol import Output
from shoal_deployments.mailbox import Mailbox
from shoal_deployments.openai.answers import Answers, Choice
from shoal_deployments.openai.errors import ApiError
from shoal_deployments.openai.failures import api_error, log_failure
from shoal_deployments.openai.service import Service
from shoal_deployments.openai.sse import EventStream
from shoal_deployments.openai.stream_events import StreamEvents
from shoal_deployments.openai.writer import Writer, usage_of

_CHARACTERS_PER_LOGPROB = 16
"""Writing one takes as long as tokenizing so many characters."""


class Delivery:
    """Takes what comes into ``mailbox`` for ``answers`` to the client."""

    def __init__(
        self, service: Service, answers: Answers, mailbox: Mailbox, began_s: float
    ) -> None:
        """``began_s`` is when the request came, by ``time.perf_counter``."""
        self._service = service
        self._answers = answers
        self._mailbox = mailbox
        self._began_s = began_s

    async def whole(self, writer: Writer) -> Response:
        """The answer in one piece."""
        answers = self._answers
        choices = answers.blank_choices()
        while answers.unfinished_ids:
            for added in self._absorb(await self._mailbox.take()):
                choices[added.index].add(added)
        size = _size(choices)

        def write(choices: Sequence[Choice]) -> Response:
            return JSONResponse(writer.whole(choices, usage_of(answers)))

        return await self._service.tokenizing.run(size, write, choices)

    async def stream(self, stream: EventStream, events: StreamEvents) -> None:
        """The answer event by event."""
        await stream.start()
        try:
            await stream.events(events.opening())
            while self._answers.unfinished_ids:
                for some, are_known in events.split(await self._next(stream)):
                    added = self._absorb(some, are_known=are_known)
                    size = _size(added)
                    await stream.events(await self._service.tokenizing.run(size, events.of, added))
            await stream.events(events.closing())
            await stream.end()
        except ShoalError as error:
            failure = api_error(error, self._service.limits.retry_after_s)
            log_failure(failure)
            await stream.fail(failure)
        except Exception:
            # A mistake of ours: the client hears of it, and the server logs it.
            await stream.fail(ApiError(500, "The server failed.", code="internal_error"))
            raise

    async def _next(self, stream: EventStream) -> list[Output]:
        """What comes next; meanwhile the client is shown that the stream is alive."""
        while True:
            try:
                async with asyncio.timeout(self._service.limits.keep_alive_s):
                    return await self._mailbox.take()
            except TimeoutError:
                await stream.comment()

    def _absorb(self, outputs: Sequence[Output], *, are_known: bool = False) -> list[Choice]:
        answers, metrics = self._answers, self._service.metrics
        before = answers.num_generated
        added = answers.absorb(outputs, are_known=are_known)
        if before == 0 < answers.num_generated:
            metrics.first_token_seconds.observe(time.perf_counter() - self._began_s)
        metrics.generated_tokens.inc(answers.num_generated - before)
        return added


def _size(choices: Sequence[Choice]) -> int:
    """How much work it is to write ``choices``, in characters to tokenize."""
    entries = sum(
        len(choice.logprobs or ()) + len(choice.prompt_logprobs or ()) for choice in choices
    )
    return entries * _CHARACTERS_PER_LOGPROB
