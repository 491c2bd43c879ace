"""The journal's thread: from the staging to the store, and again where the disk fails."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from shoal.config import JournalSettings
from shoal.errors import WorkError
from shoal.inference.journal.records import Began, Grew, encode
from shoal.inference.journal.segments import Store
from shoal.inference.journal.staging import Batch, Staging
from shoal.inference.request import Request

logger = logging.getLogger(__name__)

RETRY_S = 1.0
"""Seconds from a failure of the disk to the next attempt."""


class JournalFull(WorkError):
    """The journal's queue has reached its bound, and nothing may be left out of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JournalStats:
    """A journal at a moment; counters count from its start, tokens of prompts included."""

    written: int
    """Tokens on the disk."""

    pending: int
    """Tokens that wait for the disk."""

    oldest_s: float
    """Seconds that the oldest of them has waited."""

    dropped: int
    """Tokens left out because the queue was full."""

    refused: int
    """Requests turned away because the queue was full."""

    errors: int
    """Failed attempts to write or sync."""

    failing: int
    """1 while the last attempt failed."""


class Journal:
    """Takes records from one thread at any pace and stores them from another.

    ``progressed`` is called in the journal's thread after each batch and must not wait.
    """

    def __init__(
        self,
        settings: JournalSettings,
        store: Store,
        *,
        progressed: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        retry_s: float = RETRY_S,
    ) -> None:
        self.settings = settings
        self._store = store
        self._progressed = progressed
        self._clock = clock
        self._retry_s = retry_s
        self._staging = Staging(
            settings.queue_tokens, is_hard=settings.when_full == "drop", clock=clock
        )
        self.stored = 0
        """Number of the last batch on the disk."""
        self.failure: str | None = None
        """Why the last attempt failed."""
        self._written = self._dropped = self._refused = self._errors = 0
        self._is_dropping = False
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def flush(self, timeout_s: float) -> bool:
        """Write all that is here without waiting for the interval; whether it is done in time."""
        return self._staging.flush(timeout_s)

    def close(self, timeout_s: float) -> None:
        """Write what is there and end; a disk that fails or is slow is not waited for longer."""
        self._staging.close()
        self._thread.join(timeout_s)

    def check_room(self) -> None:
        """JournalFull where no new request may be taken."""
        if self.settings.when_full == "refuse" and self._staging.is_full:
            self._refused += 1
            why = f": {self.failure}" if self.failure else ""
            raise JournalFull(
                f"The journal waits for its disk with {self._staging.num_tokens} tokens{why}."
            )

    def begin(self, request: Request) -> int | None:
        """Add a request; gives the batch that has it, None where there was no room."""
        number = self._staging.begin(Began(request=request, time=time.time()))
        return self._counted(number, len(request.prompt))

    def grow(self, grew: Grew) -> int | None:
        """Add what came for a choice; gives the batch that has it, None where there was no room."""
        return self._counted(self._staging.grow(grew), len(grew.token_ids))

    def leave_out(self, num_tokens: int) -> None:
        """Count tokens of a request of which something was left out before."""
        self._dropped += num_tokens

    def stats(self) -> JournalStats:
        """The journal now; any thread may ask."""
        return JournalStats(
            written=self._written,
            pending=self._staging.num_tokens,
            oldest_s=round(self._staging.oldest_s, 3),
            dropped=self._dropped,
            refused=self._refused,
            errors=self._errors,
            failing=int(self.failure is not None),
        )

    def _counted(self, number: int | None, num_tokens: int) -> int | None:
        if number is None:
            self._dropped += num_tokens
            if not self._is_dropping:
                self._is_dropping = True
                logger.warning("the journal's queue is full: tokens are left out")
        # Half empty, so that a queue at its bound does not fill the log.
        elif self._is_dropping and 2 * self._staging.num_tokens <= self.settings.queue_tokens:
            self._is_dropping = False
            logger.warning("the journal's queue has room again")
        return number

    def _run(self) -> None:
        not_before = self._clock()
        pause_s = 0.0 if self.settings.fsync == "always" else self.settings.interval_s
        try:
            while (batch := self._staging.take(not_before)) is not None:
                not_before = self._clock() + pause_s
                self._keep(batch)
                self._staging.done()
                self._progressed()
        # The edge of the thread. Without it records would wait for ever and nobody would know.
        except Exception as error:
            logger.exception("the journal failed: nothing more is written to it")
            self.failure = f"{type(error).__name__}: {error}"
            self._staging.close()
        finally:
            self._store.close()

    def _keep(self, batch: Batch) -> None:
        """Store ``batch``, however long it takes; at the end of the process give up."""
        lines = b"".join(map(encode, batch.records()))
        while True:
            try:
                self._store.append(lines, sync=self.settings.fsync != "never")
            except OSError as error:
                self._errors += 1
                if self.failure is None:
                    logger.error("the journal cannot be written, and waits: %s", error)
                self.failure = f"{type(error).__name__}: {error.strerror or error}"
                if self._staging.wait_closed(self._retry_s):
                    logger.error("%d tokens are not in the journal", batch.num_tokens)
                    return
                continue
            if self.failure is not None:
                logger.warning("the journal can be written again")
            self.failure = None
            self._written += batch.num_tokens
            self.stored = batch.number
            return
