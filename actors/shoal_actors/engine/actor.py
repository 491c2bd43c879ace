"""The engine actor: one replica of the model in a process of its own.

    frontend                                   actor
       │── outputs(me) ────────────────────────> │  one stream; an empty list says: connected
       │── renew(me), once a second ───────────> │  the lease, and the engine's pulse
       │── submit([Submission, ...]) ──────────> │  all or none
       │ <── [Output, ...], one list per step ───│  for all requests of this frontend
       │── abort([id, ...]) ───────────────────> │  in any state, also before its submission
       │── flush() ────────────────────────────> │  by who leaves: all goes to the journal at once

The engine computes in a thread of its own. If its loop fails or a step hangs, the streams end, and
the process exits with a status that is not 0, for whoever supervises it to start another.
"""

from __future__ import annotations

import asyncio
import dataclasses
import faulthandler
import logging
import os
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import torch

from shoal.config import ServeSettings
from shoal.errors import ShoalError, WorkError
from shoal.inference import StepEngine
from shoal.inference.journal import JournaledEngine, open_journal
from shoal.inference.loading import certified, load_engine
from shoal.inference.protocol import Output, Submission
from shoal.models import weights_mark
from shoal_actors.engine.awake import AwakeClock
from shoal_actors.engine.lease import Leases
from shoal_actors.engine.loop import EngineLoop
from shoal_actors.engine.pulse import EngineFacts, Pulse
from shoal_actors.engine.stream import OutputStream
from shoal_actors.engine.watchdog import Watchdog

logger = logging.getLogger(__name__)

_FLUSH_S = 1.5
"""What the journal's disk may take while a frontend waits to leave."""
_FAREWELL_S = 1.0
"""What the ends of streams have to reach the frontends before the process exits."""


class EngineActor:
    """Made by Ray; ready once the model is loaded, packed and certified."""

    def __init__(
        self, folder: str, settings: ServeSettings, place: int = 0, num_blocks: int | None = None
    ) -> None:
        """``place`` among the engines names its journal; ``num_blocks`` as for ``load_engine``.

        Raises ConfigError and WorkError as ``load_engine`` does, ConfigError for the journal.
        """
        torch.set_num_threads(settings.threads)
        engine = load_engine(Path(folder), settings, num_blocks)
        certificate = certified(engine)
        self._facts = EngineFacts(
            limits=engine.limits,
            fingerprint=certificate.fingerprint,
            weights=weights_mark(Path(folder)),
            certificate=dataclasses.asdict(certificate) | {"passed": certificate.passed},
        )
        self._streams: dict[str, OutputStream] = {}
        # Neither the silence of frontends nor a step lasts longer for this process's own standing
        # still: what waits for it meanwhile is to find it when it goes on.
        clock = AwakeClock()
        self._leases = Leases(clock)
        self._moved_from: Counter[int] = Counter()
        self._journal = None
        journaled: StepEngine = engine
        if settings.journal.dir is not None:
            self._journal = open_journal(
                settings.journal,
                place,
                facts={"model": Path(folder).name, "fingerprint": certificate.fingerprint},
                progressed=lambda: self._loop.wake(),
            )
            journaled = JournaledEngine(engine, self._journal)
        self._loop = EngineLoop(journaled, self._deliver, self._fail, clock)
        self._watchdog = Watchdog(
            self._loop,
            self._leases,
            lapsed=self._end_stream,
            stalled=self._stalled,
            stall_s=settings.stall_s,
        )
        if self._journal is not None:
            self._journal.start()
        self._loop.start()
        self._watchdog.start()

    async def facts(self) -> EngineFacts:
        """What does not change."""
        return self._facts

    async def pulse(self) -> Pulse:
        """The engine at this moment."""
        journal = None if self._journal is None else self._journal.stats()
        return Pulse(
            stats=self._loop.stats,
            busy_s=self._loop.busy_s,
            moved_from=dict(self._moved_from),
            journal=journal,
        )

    async def outputs(self, frontend: str) -> AsyncIterator[list[Output]]:
        """Connect ``frontend``, whose id nobody used before; ends when its lease does."""
        stream = self._streams[frontend] = OutputStream()
        self._leases.grant(frontend)
        try:
            yield []
            while outputs := await stream.take():
                yield outputs
        finally:
            self._leases.end(frontend)
            self._loop.drop(frontend)
            del self._streams[frontend]

    async def renew(self, frontend: str) -> Pulse | None:
        """The pulse, for a frontend that is connected."""
        return await self.pulse() if self._leases.renew(frontend) else None

    async def submit(self, submissions: Sequence[Submission]) -> ShoalError | None:
        """Take all of ``submissions``, or none and tell why."""
        if not all(self._leases.holds(submission.frontend) for submission in submissions):
            return WorkError("This frontend is not connected to the engine.")
        try:
            await asyncio.wrap_future(self._loop.submit(submissions))
        except ShoalError as error:
            return error
        self._moved_from.update(
            each.moved_from for each in submissions if each.moved_from is not None
        )
        return None

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Give up requests in any state, and those that are still to come."""
        self._loop.abort(request_ids)

    async def flush(self) -> bool:
        """Have the journal write all that it was given; whether its disk did in time."""
        return self._journal is None or await asyncio.to_thread(self._journal.flush, _FLUSH_S)

    def _deliver(self, by_frontend: Mapping[str, list[Output]]) -> None:
        for frontend, outputs in by_frontend.items():
            stream = self._streams.get(frontend)
            if stream is not None:
                stream.put(outputs)

    def _end_stream(self, frontend: str) -> None:
        stream = self._streams.get(frontend)
        if stream is not None:
            logger.warning("a frontend has left without a word: its requests are given up")
            stream.end()

    def _fail(self, reason: str) -> None:
        """End all streams and then the process."""
        logger.error("%s This process ends.", reason)
        for stream in tuple(self._streams.values()):
            stream.end()
        threading.Timer(_FAREWELL_S, _exit).start()

    def _stalled(self, busy_s: float) -> None:
        faulthandler.dump_traceback(sys.stderr)
        self._fail(f"A step has taken {busy_s:.1f} seconds.")


def _exit() -> NoReturn:
    # Nothing is left to put in order, and a thread that hangs would hold up any other way to end.
    os._exit(1)
