"""The process that writes one rank's part of each save, so that the rank need not wait.

    rank    ── WriteJob, Abandon ──►  writer     shared memory ─► file ─► note
            ◄────── Outcome ────────             publisher: all notes ─► published step ─► prune

It ends with the rank that started it, whatever it is doing then, and knows neither torch nor Ray.
"""

from __future__ import annotations

import mmap
import os
import signal
import sys
import time
from collections import deque
from multiprocessing.connection import Connection

from shoal.errors import WorkError
from shoal.storage.catalog import discard, prune_or_warn
from shoal.storage.files import FileRecord, creating
from shoal.storage.job import Abandon, Outcome, Publication, WriteJob
from shoal.storage.media import medium_of
from shoal.storage.parts import await_begin, gather_parts, note_failure, note_part
from shoal.storage.publish import prepare, publish

_WORD_S = 5.0
"""Seconds for the rank to hear from the publisher what became of a save."""

_LOOK_S = 0.01


class _Abandoned(Exception):
    """The rank gave the save up."""


class Writer:
    """Takes jobs from one rank, in their order."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._parent = os.getppid()
        self._jobs: deque[WriteJob] = deque()
        self._abandoned: set[str] = set()

    def serve(self) -> None:
        """Work until the rank ends; then raises EOFError."""
        while True:
            while not self._jobs:
                self._hear()
            job = self._jobs.popleft()
            error = self._work(job)
            self._connection.send(Outcome(token=job.place.token, error=error))
            self._abandoned.discard(job.place.token)
            if error is None and job.publication is not None:
                prune_or_warn(job.place.folder, job.publication.keep)

    def _hear(self) -> None:
        """Wait for a message and keep it."""
        message = self._connection.recv()
        if isinstance(message, Abandon):
            self._abandoned.add(message.token)
        else:
            self._jobs.append(message)

    def _check(self, token: str) -> None:
        """Called between two pieces of work on a save; raises where it is not wanted any more."""
        while self._connection.poll():
            self._hear()
        if os.getppid() != self._parent:
            raise EOFError
        if token in self._abandoned:
            raise _Abandoned

    def _work(self, job: WriteJob) -> str | None:
        """Do one job; what went wrong, if anything did."""
        token, draft = job.place.token, job.place.draft

        def check() -> None:
            self._check(token)

        published = False
        try:
            check()
            if job.publication is not None:
                prepare(job.place, job.publication.num_bytes)
            await_begin(draft, check, job.patience_s)
            note_part(draft, job.name, self._write(job))
            if job.publication is not None:
                self._publish(job, job.publication)
                published = True
        except _Abandoned:
            return "it was given up"
        except EOFError:
            raise
        except Exception as error:  # the edge to the rank, which passes it on to all
            if job.publication is None and self._is_given_up(job):
                return "it was given up"
            problem = str(error) if isinstance(error, WorkError) else repr(error)
            note_failure(draft, job.name, problem)
            return problem
        finally:
            if job.publication is not None and not published:
                discard(draft)
        return None

    def _is_given_up(self, job: WriteJob) -> bool:
        """Whether what went wrong here only follows from what the publisher has to tell.

        A publisher that fails takes the folder away under the others, then says why.
        """
        deadline = time.monotonic() + _WORD_S
        try:
            while not medium_of(job.place.draft).has_begun(job.place.draft):
                self._check(job.place.token)
                if time.monotonic() > deadline:
                    return False
                time.sleep(_LOOK_S)
        except _Abandoned:
            return True
        except OSError:
            pass  # the medium does not say: what went wrong here is told
        return False

    def _write(self, job: WriteJob) -> FileRecord:
        path = job.place.draft / job.name
        memory = mmap.mmap(job.descriptor, job.num_bytes, prot=mmap.PROT_READ)
        with creating(path, lambda: self._check(job.place.token)) as file:
            file.write(memory)
            return file.finish()

    def _publish(self, job: WriteJob, publication: Publication) -> None:
        def check() -> None:
            self._check(job.place.token)

        shards = gather_parts(job.place.draft, publication.names, check, job.patience_s)
        check()
        publish(job.place, shards, publication.contents)


def main(descriptor: int) -> None:
    """Serve the rank at the other end of a socket."""
    # A terminal's Ctrl-C or end and a supervisor's SIGTERM reach the whole process group. The rank
    # decides what becomes of a save; its end is the end of this process.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        Writer(Connection(descriptor)).serve()
    except (EOFError, OSError):
        os._exit(0)  # at once: the rank is gone, and nobody is left to be told anything


if __name__ == "__main__":
    main(int(sys.argv[1]))
