"""Ids of a stream's events: all that is needed to go on after any of them, on any replica.

    id: AQ5f…3Q.12-9e-.5d0c9a31
        │       │      └ CRC-32 of the rest
        │       └ per choice: nothing for one of which nothing was sent, or the tokens of which all
        │         was sent and an ``e`` after its end; one more part, ``u``, after the usage
        └ base64url: answer, time, seed, hashes of body and model, fingerprint

The server keeps nothing. It computes the answer again, which gives the same bits, and leaves out
what the client has. Who asks with another body, or asks another model, is refused.
"""

from __future__ import annotations

import base64
import binascii
import re
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from shoal_deployments.openai.answers import Choice
from shoal_deployments.openai.errors import ApiError, shown

HEADER = "Last-Event-ID"

_VERSION = 1
_FIXED = struct.Struct(">B16sIQ8s8s")
_FORM = re.compile(r"([A-Za-z0-9_-]{60,400})\.([0-9eu-]{0,4000})\.([0-9a-f]{8})")
_SENT = re.compile(r"(?:([0-9]{1,9})(e?))?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """What an answer begins with; the same in all of its events."""

    number: bytes
    """16 bytes that tell it from all others."""

    created: int
    """Seconds since 1970."""

    seed: int
    """What its draws start from where the body names no seed."""

    body: bytes
    """Hash of what was asked."""

    model: bytes
    """Hash of the model's name and weights."""

    fingerprint: str
    """Of the kernels that compute it."""


@dataclass(kw_only=True, slots=True)
class Sent:
    """What the client has of one choice."""

    num_tokens: int | None = None
    """Tokens of which all was sent; None before the first event of the choice."""

    has_ended: bool = False

    def has(self, num_tokens: int, has_ended: bool) -> bool:
        """Whether that includes what the token ``num_tokens`` added, or the end."""
        if self.num_tokens is None or num_tokens > self.num_tokens:
            return False
        return self.has_ended or not has_ended


class Progress:
    """How far a stream of ``num_choices`` has come, or had come when it broke."""

    def __init__(self, num_choices: int) -> None:
        self.sent = [Sent() for _ in range(num_choices)]
        self.has_usage = False

    def add(self, choice: Choice) -> None:
        """Count what was added to a choice as sent."""
        sent = self.sent[choice.index]
        sent.num_tokens = (sent.num_tokens or 0) + len(choice.token_ids)
        sent.has_ended = choice.finish_reason is not None

    def __str__(self) -> str:
        parts = [
            "" if sent.num_tokens is None else f"{sent.num_tokens}{'e' * sent.has_ended}"
            for sent in self.sent
        ]
        return "-".join([*parts, "u"] if self.has_usage else parts)


class EventIds:
    """Makes the ids of one stream."""

    def __init__(self, origin: Origin, progress: Progress) -> None:
        fixed = _FIXED.pack(
            _VERSION, origin.number, origin.created, origin.seed, origin.body, origin.model
        )
        packed = base64.urlsafe_b64encode(fixed + origin.fingerprint.encode()).rstrip(b"=")
        self._head = packed.decode() + "."
        self._crc = zlib.crc32(self._head.encode())
        self._progress = progress

    def current(self) -> str:
        """The id of an event after which the client has what the progress says."""
        text = str(self._progress)
        return f"{self._head}{text}.{zlib.crc32(text.encode(), self._crc):08x}"


def read_event_id(values: Sequence[str], num_choices: int) -> tuple[Origin, Progress]:
    """What the values of the header ``Last-Event-ID`` say.

    Raises:
        ApiError: 400 for what is not one id of a stream of ``num_choices``.
    """
    text = values[0] if len(values) == 1 else ""
    match = _FORM.fullmatch(text)
    if match is None or zlib.crc32(text[:-9].encode()) != int(match[3], 16):
        raise refused(f"{shown(text)} is no id of an event of this server, or not whole")
    origin = _origin(match[1])
    if origin is None:
        raise refused(f"{shown(text)} comes from another version of this server")
    parts = match[2].split("-")
    progress = Progress(num_choices)
    if parts[-1] == "u":
        progress.has_usage = True
        parts.pop()
    found = [_SENT.fullmatch(part) for part in parts]
    if len(found) != num_choices or None in found:
        raise refused(f"it is the id of a stream of {len(found)} choices, not {num_choices}")
    for sent, form in zip(progress.sent, found, strict=True):
        if form is not None and form[1] is not None:
            sent.num_tokens, sent.has_ended = int(form[1]), form[2] == "e"
    return origin, progress


def refused(problem: str) -> ApiError:
    """The refusal to go on with a stream: status 400."""
    message = f"{HEADER}: {problem}. Leave the header out to begin anew."
    return ApiError(400, message, param=HEADER, code="invalid_event_id")


def _origin(packed: str) -> Origin | None:
    """What the first part of an id holds; None where it is of another version."""
    try:
        data = base64.urlsafe_b64decode(packed + "=" * (-len(packed) % 4))
        version, number, created, seed, body, model = _FIXED.unpack(data[: _FIXED.size])
        fingerprint = data[_FIXED.size :].decode("ascii")
    except (binascii.Error, struct.error, UnicodeDecodeError):
        return None
    if version != _VERSION or seed >= 2**63 or not fingerprint:
        return None
    return Origin(
        number=number,
        created=created,
        seed=seed,
        body=body,
        model=model,
        fingerprint=fingerprint,
    )
