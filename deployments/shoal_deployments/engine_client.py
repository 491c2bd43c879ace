"""What the HTTP layer asks of the engines: over Ray actors in service, a script in tests.

    HTTP request                     EngineClient                       engines
       │ submit(requests, mailbox) ──> │ choose a replica ── Submission ──> │
       │ <────── mailbox.put(outputs) ─│ <── list[Output], one per step ────│
       │ abort(ids) ─────────────────> │ ── ids ──────────────────────────> │

All methods are called on the event loop of the frontend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from shoal.errors import ConfigError, WorkError
from shoal.inference.journal import JournalStats
from shoal.inference.limits import Limits
from shoal.inference.protocol import Stats
from shoal.inference.request import Request
from shoal_deployments.mailbox import Mailbox


class EngineUnavailable(WorkError):
    """No replica takes requests: starting, draining or lost; answered with 503."""


class EngineFailed(WorkError):
    """A step failed, and the request with it; answered with 500."""


def other_fingerprint(fingerprint: str) -> ConfigError:
    """The refusal to go on with a stream whose bits nobody here computes."""
    problem = "no engine here has the kernels that it began with, so the bits might differ"
    return ConfigError("Last-Event-ID", fingerprint, problem, "Leave the header out to begin anew")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCard:
    """The model that is served."""

    name: str
    """What clients write in ``model``."""

    created: int
    """When its weights were written; seconds since 1970."""

    limits: Limits
    """What every replica takes; requests are checked against it before they are submitted."""

    weights: str = ""
    """Tells these weights from others under the same name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaStats:
    """One replica at a moment."""

    replica: str
    stats: Stats

    busy_s: float = 0.0
    """How long the engine has been at its step; 0 while there is no work."""

    migrated: int = 0
    """Requests that went on elsewhere, as those say that took them over."""

    certificate: Mapping[str, Any] = field(default_factory=dict)
    """What was proven of its kernels when it loaded; plain JSON values."""

    journal: JournalStats | None = None
    """Unset where no journal is kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaHealth:
    """Whether one replica gets on."""

    replica: str

    progresses: bool
    """False once the engine is lost or gives no sign of life; one whose step hangs ends itself
    after ``serve.stall_s``."""

    detail: str = ""
    """What is wrong, for a person; an engine that gets on may have other weights."""


class EngineClient(Protocol):
    """The engines as one frontend sees them."""

    @property
    def card(self) -> ModelCard:
        """The model; the same for as long as the application runs."""
        ...

    async def submit(
        self, requests: Sequence[Request], mailbox: Mailbox, fingerprint: str | None = None
    ) -> str | None:
        """Hand over the requests of one client, all of them or none.

        With ``fingerprint`` they go only where kernels with that one compute them.

        Returns once the engines have taken them, with the fingerprint of the kernels that compute
        them, to the end: replicas with the same one give the same bits. None where nothing was
        proven of the kernels. From then on their outputs are put into ``mailbox``, until each
        choice has its finish reason or the request is aborted. A failure that ends them goes to
        ``mailbox.fail``. May be cancelled at any point: the caller aborts all ids afterwards.

        Raises:
            ConfigError: no engine takes such a request, or none has that ``fingerprint``.
            Overloaded: no queue has room; answered with 429.
            EngineUnavailable: no replica takes requests.
        """
        ...

    def abort(self, request_ids: Sequence[str]) -> None:
        """Give up requests in any state; never blocks, never raises, may be called again.

        An id that the engine has not seen yet is remembered, so that the request is dropped when
        it arrives.
        """
        ...

    async def stats(self) -> Sequence[ReplicaStats]:
        """Every replica that answers, in a fixed order."""
        ...

    async def health(self) -> Sequence[ReplicaHealth]:
        """Every replica, in the same order; answers from what is known, within a second."""
        ...
