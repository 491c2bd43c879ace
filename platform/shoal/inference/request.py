"""A request: prompt, parameters and seed, which with the weights determine every answer."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from shoal.inference.params import SamplingParams


def fresh_seed() -> int:
    """63 bits from the operating system: unlike after a restart, and nobody's stream moves on."""
    return secrets.randbits(63)


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What a client asked for, as a plain value that crosses processes."""

    id: str
    """Unique among the requests of an engine."""

    prompt: tuple[int, ...]
    """Token ids."""

    params: SamplingParams = field(default_factory=SamplingParams)

    seed: int = field(default_factory=fresh_seed)
    """What is drawn with: ``params.seed``, or where that is unset a fresh one, drawn when the
    request was made, so that the request goes on the same wherever it is computed."""

    durable: bool = False
    """Whether the last output of each choice waits until the journal has the choice's tokens."""

    def __post_init__(self) -> None:
        if self.params.seed is not None:
            object.__setattr__(self, "seed", self.params.seed)
