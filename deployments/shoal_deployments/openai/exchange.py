"""One request from its body to the last byte of its answer.

    body ── checked ── tokenized ── submitted ──┬── all outputs ── one JSON object
                                                └── each step ──── one event for each choice

All checks come before the first byte. However it ends, the requests that have not finished are
aborted: because the client left (the server says so, or cancels us), because it reads too slowly,
or because a step failed.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Generic

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from shoal.errors import ConfigError, Overloaded, ShoalError
from shoal.inference.request import Request
from shoal_deployments.access_log import note_left
from shoal_deployments.engine_client import EngineUnavailable
from shoal_deployments.mailbox import Mailbox
from shoal_deployments.openai.answers import Answers
from shoal_deployments.openai.connection import ClientLeft, while_connected
from shoal_deployments.openai.delivery import Delivery
from shoal_deployments.openai.endpoint import Endpoint, PromptTokens
from shoal_deployments.openai.errors import error_response
from shoal_deployments.openai.event_ids import HEADER, EventIds, Origin, Progress, refused
from shoal_deployments.openai.failures import api_error, log_failure
from shoal_deployments.openai.json_body import read_json_object
from shoal_deployments.openai.prepare import (
    check_choices,
    check_durable,
    check_model,
    make_requests,
)
from shoal_deployments.openai.resuming import new_origin, stream_origin
from shoal_deployments.openai.service import Service
from shoal_deployments.openai.sse import EventStream
from shoal_deployments.openai.stream_events import StreamEvents
from shoal_deployments.openai.validation import BodyT, parse_body
from shoal_deployments.openai.writer import Header


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
            log_failure(refusal)
            await error_response(refusal)(scope, receive, send)

    async def _answer(
        self, content: dict[str, Any], scope: Scope, receive: Receive, send: Send
    ) -> None:
        service, endpoint = self._service, self._endpoint
        card = service.engine.card
        body: BodyT = parse_body(endpoint.body_type, content, service.limits)
        check_model(body, card)
        check_durable(body, service.journal)
        params = endpoint.params(body)
        prompts = await endpoint.prompts(body, service.tokenizing)
        check_choices(len(prompts), params.n, service.limits, card)
        origin, progress = self._beginning(Headers(scope=scope), body, prompts)
        answer_id = f"{endpoint.id_prefix}-{origin.number.hex()}"
        # What was under way before a stream broke may still be: the answer's id would be taken.
        name = f"{answer_id}-{uuid.uuid4().hex[:8]}" if origin.fingerprint else answer_id
        requests = make_requests(
            name,
            prompts,
            params,
            card,
            service.limits,
            endpoint.field_names(body),
            seed=origin.seed,
            durable=bool(body.durable),
        )
        answers = Answers(requests)
        wanted = origin.fingerprint or None
        async with self._submitted(requests, answers, wanted) as (mailbox, fingerprint):
            service.metrics.prompt_tokens.inc(answers.num_prompt)
            delivery = Delivery(service, answers, mailbox, self._begin)
            header = Header(
                id=answer_id,
                created=origin.created,
                model=card.name,
                system_fingerprint=fingerprint,
            )
            writer = await endpoint.writer(header, body, prompts, service.tokenizing)
            if body.stream:
                ids = None
                if fingerprint is not None:
                    ids = EventIds(replace(origin, fingerprint=fingerprint), progress)
                stream = EventStream(
                    send,
                    answer_id,
                    write_timeout_s=service.limits.write_timeout_s,
                    keep_alive_s=service.limits.keep_alive_s,
                )
                events = StreamEvents(writer, answers, progress, ids)
                await delivery.stream(stream, events)
            else:
                whole = await delivery.whole(writer)
                whole.headers["x-request-id"] = answer_id
                await whole(scope, receive, send)

    def _beginning(
        self, headers: Headers, body: BodyT, prompts: Sequence[PromptTokens]
    ) -> tuple[Origin, Progress]:
        """Where the answer begins, and what of it the client has."""
        last_ids = headers.getlist(HEADER)
        if body.stream:
            kind, card = self._endpoint.id_prefix, self._service.engine.card
            return stream_origin(last_ids, kind, body, prompts, card)
        if last_ids:
            raise refused("the request asks for no stream")
        return new_origin(), Progress(0)

    @asynccontextmanager
    async def _submitted(
        self, requests: Sequence[Request], answers: Answers, wanted: str | None
    ) -> AsyncIterator[tuple[Mailbox, str | None]]:
        """Where the outputs of ``requests`` arrive, and the fingerprint of what computes them.

        That is the one that is ``wanted``, if one is. What has not finished at the end of the block
        is aborted.
        """
        engine = self._service.engine
        mailbox = Mailbox(self._service.limits.unread_tokens)
        is_taken = True
        try:
            try:
                fingerprint = await engine.submit(requests, mailbox, wanted)
            except (ConfigError, Overloaded, EngineUnavailable):
                is_taken = False
                raise
            yield mailbox, fingerprint
        finally:
            mailbox.close()
            if is_taken and (unfinished := answers.unfinished_ids):
                engine.abort(unfinished)
