"""A stream's beginning, or the place from which it goes on."""

from __future__ import annotations

import hashlib
import time
import uuid
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import replace

from shoal.inference.request import fresh_seed
from shoal_deployments.engine_client import ModelCard
from shoal_deployments.openai.endpoint import PromptTokens
from shoal_deployments.openai.event_ids import Origin, Progress, read_event_id, refused
from shoal_deployments.openai.requests import GenerationBody

_HASH_BYTES = 8
_NOT_HASHED = {"model", "prompt", "messages"}
"""Fields of a body that are hashed with the model, or as the tokens that they become."""


def new_origin() -> Origin:
    """Of an answer of which nobody has seen anything."""
    return Origin(
        number=uuid.uuid4().bytes,
        created=int(time.time()),
        seed=fresh_seed(),
        body=bytes(_HASH_BYTES),
        model=bytes(_HASH_BYTES),
        fingerprint="",
    )


def stream_origin(
    last_ids: Sequence[str],
    kind: str,
    body: GenerationBody,
    prompts: Sequence[PromptTokens],
    card: ModelCard,
) -> tuple[Origin, Progress]:
    """Where the answer to ``body`` begins, or began, and what of it the client has.

    ``last_ids`` are the values of the header ``Last-Event-ID``, ``kind`` names the endpoint. The
    fingerprint of a new stream is still to be set.

    Raises:
        ApiError: 400 for an id that is not whole, or of a stream of another body or model.
    """
    asked = _body_hash(kind, body, prompts)
    model = _hash([card.name.encode(), card.weights.encode()])
    num_choices = len(prompts) * body.num_choices
    if not last_ids:
        return replace(new_origin(), body=asked, model=model), Progress(num_choices)
    origin, progress = read_event_id(last_ids, num_choices)
    if origin.model != model:
        raise refused("the stream was of another model, or of other weights")
    if origin.body != asked:
        raise refused("the stream answered another body, and only the same one goes on with it")
    return origin, progress


def _body_hash(kind: str, body: GenerationBody, prompts: Sequence[PromptTokens]) -> bytes:
    """Hash of all that decides about the events of a stream, however the body was written."""
    rest = body.model_dump_json(exclude=_NOT_HASHED).encode()
    parts = [kind.encode(), rest]
    for prompt in prompts:
        parts += [_packed(prompt.ids), (prompt.text or "").encode()]
    return _hash(parts)


def _packed(ids: Sequence[int]) -> bytes:
    try:
        return array("q", ids).tobytes()
    except OverflowError:  # no token has such an id, and the request is about to be refused
        return repr(ids).encode()


def _hash(parts: Iterable[bytes]) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8))
        digest.update(part)
    return digest.digest()[:_HASH_BYTES]
