"""A frontend's connection to one engine actor: made, kept, lost and made again.

STARTING ──> UP <──> SILENT
    │         │         │          SILENT: connected, but no pulse for a while; after longer still
    └───────> DOWN <────┘                  its requests are given to others
               └──> UP             DOWN: the stream has ended; another is tried
"""

from __future__ import annotations

import asyncio
import contextvars
import enum
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

import ray
from ray.exceptions import RayError

from shoal.errors import ShoalError, WorkError
from shoal.inference.protocol import Output, Submission
from shoal.inference.request import Request
from shoal_actors.engine.awake import LOOK_S, AwakeClock
from shoal_actors.engine.lease import LEASE_S
from shoal_actors.engine.pulse import EngineFacts, Pulse

logger = logging.getLogger(__name__)

RENEW_S = 1.0
SILENT_S = 3.0
"""Age of the last pulse from which on an engine does not count as up."""
STILL_S = LEASE_S
"""Age from which on others compute what it was to compute; where it cannot be reached, rather than
stands still, it gives the same requests up at that time."""
PULSE_S = 1.8
"""How long an engine that is asked for its pulse may take; less than whoever asks waits."""
_RETRY_S = 0.5
_TELL_S = 1.0
_CONNECT_S = 10.0
_FLUSH_S = 2.0


class LinkState(enum.Enum):
    """See the module's picture."""

    STARTING = "starting"
    UP = "up"
    SILENT = "silent"
    DOWN = "down"


class LinkOwner(Protocol):
    """Who is told what arrives; on the event loop."""

    def on_outputs(self, place: int, outputs: Sequence[Output]) -> None:
        """A step of the engine at ``place`` gave these."""
        ...

    def on_lost(self, place: int, reason: str) -> None:
        """Nothing more comes for what was submitted there."""
        ...

    def on_silent(self, place: int, silent_s: float) -> None:
        """Nothing was heard of it for ``STILL_S`` or more, but it may come back.

        Called once a second meanwhile.
        """
        ...


class EngineLink:
    """The engine at ``place``.

    ``find`` gives its actor's handle, in a thread, or ValueError; ``cancel`` ends the stream that
    the actor gave, once nobody reads it any more.
    """

    def __init__(
        self,
        place: int,
        find: Callable[[], Any],
        owner: LinkOwner,
        clock: Callable[[], float] | None = None,
        cancel: Callable[[Any], object] = ray.cancel,
    ) -> None:
        self.place = place
        self.facts: EngineFacts | None = None
        """What it said of itself when it last connected."""
        self.pulse: Pulse | None = None
        """What it last said of itself."""
        self.connected = asyncio.Event()
        """Set once it was up for the first time."""
        self._find = find
        self._owner = owner
        self._cancel = cancel
        self._actor: Any = None
        self._frontend = ""
        self._clock = clock or AwakeClock()
        self._heard = 0.0
        self._submitting: set[asyncio.Timeout] = set()
        self._aborts: list[str] = []
        self._task: asyncio.Task[None] | None = None
        # Ray cancels with a request's task the calls that were made in its context: a submission
        # half way, and even the abort. So calls are made in the context of whoever made the link.
        self._context = contextvars.copy_context()

    def start(self) -> None:
        """Begin to connect."""
        self._task = asyncio.create_task(self._keep(), name=f"engine link {self.place}")

    async def close(self) -> None:
        """Leave: what is under way there is given up, and the rest is in the engine's journal."""
        actor = self._actor
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if actor is not None:
            await self._flush(actor)

    @property
    def state(self) -> LinkState:
        """Whether it takes requests."""
        if self._actor is not None:
            is_heard = self._clock() - self._heard < SILENT_S
            return LinkState.UP if is_heard else LinkState.SILENT
        return LinkState.DOWN if self.connected.is_set() else LinkState.STARTING

    async def submit(self, requests: Sequence[Request], moved_from: int | None = None) -> None:
        """Hand over all of ``requests``, or none; the engine at ``moved_from`` lost them.

        Raises ConfigError or Overloaded as the engine does, WorkError where it is lost, or silent
        for ``STILL_S``: then it may have taken them, or take them yet.
        """
        if self._actor is None:
            raise WorkError(f"Engine {self.place} is not connected.")
        submissions = [
            Submission(request=each, frontend=self._frontend, moved_from=moved_from)
            for each in requests
        ]
        try:
            async with self._unless_silent():
                refusal: ShoalError | None = await self._context.run(
                    self._actor.submit.remote, submissions
                )
        except RayError as error:
            raise WorkError(f"Engine {self.place} was lost: {_short(error)}") from error
        except TimeoutError:
            problem = f"Engine {self.place} has given no sign of life for {STILL_S:g} seconds."
            raise WorkError(problem) from None
        if refusal is not None:
            raise refusal

    def abort(self, request_ids: Sequence[str]) -> None:
        """Give up requests; those of one turn of the event loop go in one call."""
        if not self._aborts:
            asyncio.get_running_loop().call_soon(self._send_aborts, context=self._context)
        self._aborts.extend(request_ids)

    async def fresh_pulse(self) -> Pulse | None:
        """What the engine says now; None where it cannot be asked, or does not answer."""
        actor = self._actor
        if actor is None:
            return None
        try:
            async with asyncio.timeout(PULSE_S):
                self.pulse = await self._context.run(actor.pulse.remote)
        except (RayError, TimeoutError):
            return None
        return self.pulse

    async def _flush(self, actor: Any) -> None:
        try:
            async with asyncio.timeout(_FLUSH_S):
                is_done = await actor.flush.remote()
        except (RayError, TimeoutError) as error:
            logger.warning("engine %d was not heard of at the end: %s", self.place, _short(error))
        else:
            if not is_done:
                logger.warning("the journal of engine %d still waits for its disk", self.place)

    def _send_aborts(self) -> None:
        ids, self._aborts = self._aborts, []
        if self._actor is not None:  # an engine that is lost has given them up already
            self._actor.abort.remote(ids)

    async def _keep(self) -> None:
        while True:
            reason, is_leaving = "it closed the stream", False
            try:
                await self._connect()
            except (RayError, ValueError, TimeoutError) as error:
                reason = _short(error)
            except asyncio.CancelledError:
                is_leaving = True
                raise
            finally:
                was_up, self._actor = self._actor is not None, None
                if was_up and not is_leaving:
                    logger.warning("engine %d was lost: %s", self.place, reason)
                    self._owner.on_lost(self.place, reason)
            await asyncio.sleep(_RETRY_S)

    async def _connect(self) -> None:
        """Connect and read until the stream ends or breaks."""
        actor = await asyncio.to_thread(self._find)
        async with asyncio.timeout(_CONNECT_S):
            self.facts = await actor.facts.remote()
        self._frontend = uuid.uuid4().hex
        stream = actor.outputs.options(num_returns="streaming").remote(self._frontend)
        try:
            async with asyncio.timeout(_CONNECT_S):
                await (await anext(stream))
                self.pulse = await actor.pulse.remote()
            self._heard = self._clock()
            self._actor = actor
            self.connected.set()
            watching = asyncio.create_task(self._watch())
            renewing = asyncio.create_task(self._renew(actor))
            try:
                async for item in stream:
                    self._owner.on_outputs(self.place, await item)
            finally:
                renewing.cancel()
                watching.cancel()
        finally:
            # Ray cancels no stream by itself when its reader goes.
            self._cancel(stream)

    @asynccontextmanager
    async def _unless_silent(self) -> AsyncIterator[None]:
        """Ends the block with a TimeoutError once the engine has been silent for ``STILL_S``."""
        async with asyncio.timeout(None) as scope:
            self._submitting.add(scope)
            try:
                yield
            finally:
                self._submitting.discard(scope)

    async def _watch(self) -> None:
        """Tell of an engine that stands still."""
        due = STILL_S
        while True:
            await asyncio.sleep(LOOK_S)
            silent_s = self._clock() - self._heard
            if silent_s < STILL_S:
                due = STILL_S
            elif silent_s >= due:
                if due == STILL_S:
                    logger.warning("engine %d gives no sign of life", self.place)
                due = silent_s + _TELL_S
                self._give_up_submitting()
                self._owner.on_silent(self.place, silent_s)

    def _give_up_submitting(self) -> None:
        scopes, self._submitting = self._submitting, set()
        for scope in scopes:
            scope.reschedule(asyncio.get_running_loop().time())

    async def _renew(self, actor: Any) -> None:
        while True:
            try:
                async with asyncio.timeout(SILENT_S):
                    pulse: Pulse | None = await actor.renew.remote(self._frontend)
            except TimeoutError:
                continue
            except RayError:  # the stream breaks as well, and says so
                return
            if pulse is not None:
                self.pulse = pulse
                self._heard = self._clock()
            await asyncio.sleep(RENEW_S)


def _short(error: BaseException) -> str:
    """The first line of Ray's long messages."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
