"""One request from its body to the last byte of its answer.

    body ── checked ── tokenized ── submitted ──┬── all outputs ── one JSON object
                                                └── each step ──── one event for each choice

All checks come before the first byte. However it ends, the requests that have not finished are
aborted: because the client left (the server says so, or cancels us), because it reads too slowly,
or because a step failed.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Generic

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from shoal.errors import ConfigError, Overloaded, ShoalError
from shoal.inference.protocol import Output
from shoal.inference.request import Request
from shoal_deployments.access_log import note_left
from shoal_deployments.engine_client import EngineUnavailable
from shoal_deployments.mailbox import Mailbox
from shoal_deployments.openai.answers import Answers, Choice
from shoal_deployments.openai.connection import ClientLeft, while_connected
from shoal_deployments.openai.endpoint import Endpoint
from shoal_deployments.openai.errors import ApiError, error_response
from shoal_deployments.openai.failures import api_error
from shoal_deployments.openai.json_body import read_json_object
from shoal_deployments.openai.prepare import check_model, make_requests
from shoal_deployments.openai.service import Service
from shoal_deployments.openai.sse import EventStream
from shoal_deployments.openai.validation import BodyT, parse_body
from shoal_deployments.openai.writer import Header, Writer, usage_of

logger = logging.getLogger(__name__)

_CHARACTERS_PER_LOGPROB = 16
"""Writing one takes as long as tokenizing so many characters."""


class Exchange(Response, Generic[BodyT]):
    """The response to one POST; all work is done where the server calls it."""

    def __init__(self, service: Service, endpoint: Endpoint[BodyT]) -> None:
        super().__init__()
        self._service = service
        self._endpoint = endpoint
        self._begin = time.perf_counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        limits = self._service.limits
        try:
            with self._service.admission.hold():
                content = await read_json_object(
                    HTTPRequest(scope, receive), limits.body_bytes, limits.read_timeout_s
                )
                answer = self._answer(content, scope, receive, send)
                await while_connected(receive, answer)
        except (ClientLeft, ClientDisconnect):
            note_left(scope)
        except ShoalError as error:
            refusal = api_error(error, limits.retry_after_s)
            _log(refusal)
            await error_response(refusal)(scope, receive, send)

    async def _answer(
        self, content: dict[str, Any], scope: Scope, receive: Receive, send: Send
    ) -> None:
        service, endpoint = self._service, self._endpoint
        card = service.engine.card
        body: BodyT = parse_body(endpoint.body_type, content, service.limits)
        check_model(body, card)
        params = endpoint.params(body)
        prompts = await endpoint.prompts(body, service.tokenizing)
        answer_id, created = f"{endpoint.id_prefix}-{uuid.uuid4().hex}", int(time.time())
        requests = make_requests(
            answer_id, prompts, params, card, service.limits, endpoint.prompt_field
        )
        answers = Answers(requests)
        async with self._submitted(requests, answers) as (mailbox, fingerprint):
            service.metrics.prompt_tokens.inc(answers.num_prompt)
            header = Header(
                id=answer_id, created=created, model=card.name, system_fingerprint=fingerprint
            )
            writer = await endpoint.writer(header, body, prompts, service.tokenizing)
            if body.stream:
                stream = EventStream(send, answer_id, service.limits.write_timeout_s)
                await self._stream(stream, writer, answers, mailbox)
            else:
                whole = await self._whole(writer, answers, mailbox)
                whole.headers["x-request-id"] = answer_id
                await whole(scope, receive, send)

    @asynccontextmanager
    async def _submitted(
        self, requests: Sequence[Request], answers: Answers
    ) -> AsyncIterator[tuple[Mailbox, str | None]]:
        """Where the outputs of ``requests`` arrive, and the fingerprint of what computes them.

        What has not finished at the end of the block is aborted.
        """
        engine = self._service.engine
        mailbox = Mailbox(self._service.limits.unread_tokens)
        is_taken = True
        try:
            try:
                fingerprint = await engine.submit(requests, mailbox)
            except (ConfigError, Overloaded, EngineUnavailable):
                is_taken = False
                raise
            yield mailbox, fingerprint
        finally:
            mailbox.close()
            if is_taken and (unfinished := answers.unfinished_ids):
                engine.abort(unfinished)

    async def _whole(self, writer: Writer, answers: Answers, mailbox: Mailbox) -> Response:
        """The answer in one piece."""
        choices = answers.blank_choices()
        while answers.unfinished_ids:
            for added in self._absorb(answers, await mailbox.take()):
                choices[added.index].add(added)
        size = _size(choices)

        def write(choices: Sequence[Choice]) -> Response:
            return JSONResponse(writer.whole(choices, usage_of(answers)))

        return await self._service.tokenizing.run(size, write, choices)

    async def _stream(
        self, stream: EventStream, writer: Writer, answers: Answers, mailbox: Mailbox
    ) -> None:
        """The answer event by event."""
        await stream.start()
        try:
            await stream.events(writer.opening(answers.blank_choices()))
            while answers.unfinished_ids:
                added = self._absorb(answers, await self._next(mailbox, stream))
                chunks = await self._service.tokenizing.run(_size(added), writer.chunks, added)
                await stream.events(chunks)
            await stream.events(writer.closing(usage_of(answers)))
            await stream.end()
        except ShoalError as error:
            failure = api_error(error, self._service.limits.retry_after_s)
            _log(failure)
            await stream.fail(failure)
        except Exception:
            # A mistake of ours: the client hears of it, and the server logs it.
            await stream.fail(ApiError(500, "The server failed.", code="internal_error"))
            raise

    async def _next(self, mailbox: Mailbox, stream: EventStream) -> list[Output]:
        """What comes next; meanwhile the client is shown that the stream is alive."""
        while True:
            try:
                async with asyncio.timeout(self._service.limits.keep_alive_s):
                    return await mailbox.take()
            except TimeoutError:
                await stream.comment()

    def _absorb(self, answers: Answers, outputs: Sequence[Output]) -> list[Choice]:
        metrics, before = self._service.metrics, answers.num_generated
        added = answers.absorb(outputs)
        if before == 0 < answers.num_generated:
            metrics.first_token_seconds.observe(time.perf_counter() - self._begin)
        metrics.generated_tokens.inc(answers.num_generated - before)
        return added


def _size(choices: Sequence[Choice]) -> int:
    """How much work it is to write ``choices``, in characters to tokenize."""
    entries = sum(
        len(choice.logprobs or ()) + len(choice.prompt_logprobs or ()) for choice in choices
    )
    return entries * _CHARACTERS_PER_LOGPROB


def _log(error: ApiError) -> None:
    """The client's mistakes are not the operator's business; failures of ours are."""
    if error.status >= 500 or error.code == "slow_reader":
        logger.warning("Status %d: %s", error.status, error.message)
