"""Records of a journal, and the lines of text that they are on disk.

    2f6b01c4 {"id":"cmpl-…-0","time":…,"prompt":[72,105],"seed":7,"params":{"max_tokens":3}}
    90d1e6a2 {"id":"cmpl-…-0","choice":0,"position":0,"tokens":[12,40,7],"finish":"length"}

A line is a CRC-32 of the rest, in hexadecimal, and a JSON object; it counts if it is whole. The
first line of a segment names the format and says who wrote it.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

from shoal.errors import WorkError
from shoal.inference.params import SamplingParams
from shoal.inference.request import Request

FORMAT = 1

_CRC = re.compile(rb"[0-9a-f]{8} ")


@dataclass(frozen=True, kw_only=True, slots=True)
class Began:
    """An engine took a request: prompt, parameters and seed, all that determines its answer."""

    request: Request

    time: float
    """Seconds since 1970."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Grew:
    """What was generated for one choice of a request."""

    request_id: str
    choice: int

    position: int
    """Tokens of the choice before these."""

    token_ids: tuple[int, ...]

    finish_reason: str | None = None
    """Set in the last record of the choice; ``abort`` where nobody waited for it any more."""


Record: TypeAlias = Began | Grew


def header_line(facts: Mapping[str, str]) -> bytes:
    """The first line of a segment; ``facts`` say who wrote it."""
    return _line({"format": FORMAT, **facts})


def encode(record: Record) -> bytes:
    """The line of ``record``."""
    if isinstance(record, Began):
        request = record.request
        return _line(
            {
                "id": request.id,
                "time": round(record.time, 3),
                "prompt": request.prompt,
                "seed": request.seed,
                "params": _params(request.params),
            }
        )
    return _line(
        {
            "id": record.request_id,
            "choice": record.choice,
            "position": record.position,
            "tokens": record.token_ids,
            "finish": record.finish_reason,
        }
    )


def content_of(line: bytes) -> dict[str, Any] | None:
    """The object in ``line``; None where the line is damaged or not whole."""
    if not line.endswith(b"\n") or not _CRC.match(line):
        return None
    text = line[9:-1]
    if zlib.crc32(text) != int(line[:8], 16):
        return None
    content: dict[str, Any] = json.loads(text)
    return content


def decode(content: Mapping[str, Any]) -> Record | None:
    """The record that an undamaged line holds; None for a segment's first line.

    Raises WorkError for a format of another version.
    """
    if "format" in content:
        if content["format"] != FORMAT:
            raise WorkError(
                f"The journal has the format {content['format']}, and {FORMAT} is understood."
            )
        return None
    if "prompt" in content:
        params = {name: _frozen(value) for name, value in content["params"].items()}
        request = Request(
            id=content["id"],
            prompt=tuple(content["prompt"]),
            params=SamplingParams(**params),
            seed=content["seed"],
        )
        return Began(request=request, time=content["time"])
    return Grew(
        request_id=content["id"],
        choice=content["choice"],
        position=content["position"],
        token_ids=tuple(content["tokens"]),
        finish_reason=content["finish"],
    )


def _line(content: Mapping[str, Any]) -> bytes:
    text = json.dumps(content, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _params(params: SamplingParams) -> dict[str, Any]:
    """What differs from the defaults."""
    values = {field.name: getattr(params, field.name) for field in fields(params)}
    default = SamplingParams()
    return {name: value for name, value in values.items() if value != getattr(default, name)}


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
