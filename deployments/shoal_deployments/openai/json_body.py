"""A request's body as a JSON object: bounded, in time, and strictly JSON."""

from __future__ import annotations

import asyncio
from typing import Any

import jiter
from starlette.requests import Request

from shoal_deployments.openai.errors import ApiError

MAX_PARTS = 20_000
"""Most texts, names of fields included, and most lists and objects: some ms to parse."""


async def read_json_object(request: Request, max_bytes: int, timeout_s: float) -> dict[str, Any]:
    """The object in the body of ``request``.

    Duplicate keys, NaN, Infinity, a byte order mark, lone surrogates, invalid UTF-8, more than 200
    levels of nesting and more than ``MAX_PARTS`` parts are refused; numbers beyond the range of
    floats arrive as infinities, which every field refuses.

    Raises:
        ApiError: 400, 408, 413 or 415.
        ClientDisconnect: the client left.
    """
    _check_headers(request)
    try:
        async with asyncio.timeout(timeout_s):
            body = await _read(request, max_bytes)
    except TimeoutError:
        message = f"The body did not arrive within {timeout_s:g} seconds."
        raise ApiError(408, message, code="request_timeout") from None
    _check_parts(body)
    try:
        content = jiter.from_json(
            body, allow_inf_nan=False, catch_duplicate_keys=True, cache_mode="keys"
        )
    except ValueError as error:
        message = f"The body is not valid JSON: {error}."
        raise ApiError(400, message, code="invalid_json") from None
    if not isinstance(content, dict):
        message = f"The body has to be a JSON object, not {_kind(content)}."
        raise ApiError(400, message, code="invalid_json")
    return content


def _check_headers(request: Request) -> None:
    content_type = request.headers.get("content-type", "")
    media_type, _, parameters = content_type.partition(";")
    if media_type.strip().lower() != "application/json":
        message = (
            f"The content type {content_type[:80]!a} is not understood. Send application/json."
            if content_type
            else "The request has no content type. Send Content-Type: application/json."
        )
        raise ApiError(415, message, code="unsupported_media_type")
    charset = parameters.lower().replace(" ", "").replace('"', "").partition("charset=")[2]
    if charset not in ("", "utf-8", "utf8"):
        message = f"The character set {charset[:80]!a} is not understood. Send UTF-8."
        raise ApiError(415, message, code="unsupported_media_type")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        message = "The body is compressed. Send it as it is."
        raise ApiError(415, message, code="unsupported_media_type")


async def _read(request: Request, max_bytes: int) -> bytes:
    """All of the body.

    What is too much is read and dropped: a client that is still sending when the answer comes and
    the connection closes would see a reset instead of it. One that asked first gets the answer.
    """
    pieces: list[bytes] = []
    length = _announced(request)
    may_send = request.headers.get("expect", "").lower() != "100-continue"
    if length <= max_bytes or may_send:
        length = 0
        async for piece in request.stream():
            length += len(piece)
            if length <= max_bytes:
                pieces.append(piece)
            else:
                pieces.clear()
    if length > max_bytes:
        message = f"The body has more than {max_bytes} bytes, the limit of this server."
        raise ApiError(413, message, code="body_too_large")
    return b"".join(pieces)


def _check_parts(body: bytes) -> None:
    """Refuse what would hold up every stream while it is parsed: megabytes of tiny parts."""
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    num_parts = bare.count(b'"') // 2
    if num_parts <= MAX_PARTS:
        # What is between the texts; they may hold as many brackets as they like.
        outside = b"".join(bare.split(b'"')[::2])
        num_parts = max(num_parts, outside.count(b"[") + outside.count(b"{"))
    if num_parts > MAX_PARTS:
        message = f"The body has {num_parts} texts, or lists and objects; the limit is {MAX_PARTS}."
        raise ApiError(400, message, code="body_too_complex")


def _announced(request: Request) -> int:
    """The length that the head gives; 0 where it gives none."""
    length = request.headers.get("content-length", "")
    return int(length[:18]) if length.isdecimal() else 0


def _kind(content: object) -> str:
    if content is None:
        return "null"
    kinds = {list: "an array", str: "a string", bool: "a truth value"}
    return kinds.get(type(content), "a number")
