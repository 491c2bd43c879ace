"""A journal's store in memory, which hangs and fails as told."""

from __future__ import annotations

import threading
from typing import Any

from shoal.inference import Request, SamplingParams
from shoal.inference.journal.records import content_of, decode

DEADLINE_S = 30.0
FACTS = {"model": "tiny", "fingerprint": "fp"}


class ScriptedStore:
    """Keeps lines in memory; ``gate`` holds writes up, ``failure`` is raised by them."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.syncs: list[bool] = []
        self.gate = threading.Event()
        self.gate.set()
        self.is_writing = threading.Event()
        self.failure: Exception | None = None
        self.is_closed = False

    def append(self, lines: bytes, *, sync: bool) -> None:
        self.is_writing.set()
        assert self.gate.wait(DEADLINE_S)
        if self.failure is not None:
            raise self.failure
        self.lines.extend(lines.splitlines(keepends=True))
        self.syncs.append(sync)

    def close(self) -> None:
        self.is_closed = True

    def records(self) -> list[Any]:
        return [decode(content) for line in self.lines if (content := content_of(line))]


def asked(name: str, max_tokens: int = 3, *, durable: bool = False, prompt: int = 2) -> Request:
    params = SamplingParams(max_tokens=max_tokens)
    return Request(id=name, prompt=(7,) * prompt, params=params, durable=durable)
