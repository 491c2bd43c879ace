"""What is asked of a server, how often, and in which ways of serving."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal.bench.engine_setup import DENSE


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeBenchSetup:
    """Model, loads, rounds."""

    model: Mapping[str, Any] = field(default_factory=lambda: DENSE)
    """A Hugging Face config; weights are random, and the tokenizer has made-up words."""

    ways: Mapping[str, Mapping[str, str]] = field(
        default_factory=lambda: {
            "Serve's proxy": {},
            "HAProxy": {"RAY_SERVE_ENABLE_HA_PROXY": "1"},
        }
    )
    """Environment of each server that is timed, by name."""

    streams: tuple[int, ...] = (1, 8, 32)
    """Requests that come at once and are streamed."""

    prompt_tokens: int = 32

    new_tokens: int = 64

    rounds: int = 5
    """Timed, engine and server in turns; one more goes before to warm up."""

    first_tokens: int = 20
    """Requests, one after the other, of which the time to the first token is taken."""

    long_prompt_tokens: int = 100_000
    """Length of a text that is tokenized while another client reads its stream."""

    stream_tokens: int = 256
    """Length of that stream."""
