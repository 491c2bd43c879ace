"""A pool of gloo rank processes that tests share.

Starting a process and importing torch costs seconds, a new process group milliseconds; so the
processes live as long as the test session and each job gets fresh groups.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import traceback
import uuid
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import cloudpickle

COLLECTIVE_TIMEOUT_S = 60
JOB_TIMEOUT_S = 240


def _serve(connection: Connection, rank: int) -> None:
    """Run jobs until the pool closes the pipe."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        try:
            job = connection.recv_bytes()
        except EOFError:
            return
        world_size, store_path, payload = cloudpickle.loads(job)
        try:
            # The payload may be defined in a test module, which only resolves once paths are set.
            function, args = cloudpickle.loads(payload)
            dist.init_process_group(
                "gloo",
                store=_meet(store_path, rank, world_size),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
            )
            try:
                # Whoever is done early would hang up on those who still connect, here or in groups
                # that the function makes; whoever fails hangs up on all.
                dist.barrier()
                reply = (True, function(*args))
                with suppress(RuntimeError):
                    dist.barrier()
            finally:
                dist.destroy_process_group()
            message = cloudpickle.dumps(reply)
        except BaseException:  # the edge of the process: whatever happened goes to the test
            message = cloudpickle.dumps((False, traceback.format_exc()))
        connection.send_bytes(message)


def _meet(path: str, rank: int, world_size: int) -> Any:
    """A store for the ranks of a job once all are there: new processes have much to import."""
    import torch.distributed as dist

    store = dist.FileStore(path, world_size)  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=JOB_TIMEOUT_S))
    store.set(f"here/{rank}", "")
    store.wait([f"here/{other}" for other in range(world_size)])
    store.set_timeout(timedelta(seconds=COLLECTIVE_TIMEOUT_S))
    return store


class RankFailure(AssertionError):
    """A job raised on at least one rank; the message holds every traceback."""


class RankPool:
    """Gloo rank processes, started on first use and restarted after a failure."""

    def __init__(self) -> None:
        self._processes: list[tuple[SpawnProcess, Connection]] = []

    def run(self, world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``function(*args)`` on each rank inside a default gloo group; results by rank.

        ``function`` is one of a test module, which goes along with it, or of an installed package.
        """
        self._grow(world_size)
        if function.__module__.startswith("tests."):
            cloudpickle.register_pickle_by_value(sys.modules[function.__module__])
        payload = cloudpickle.dumps((function, args))
        with tempfile.TemporaryDirectory() as folder:
            store_path = str(Path(folder) / uuid.uuid4().hex)
            job = cloudpickle.dumps((world_size, store_path, payload))
            for _, connection in self._processes[:world_size]:
                connection.send_bytes(job)
            replies = self._collect(world_size)
        failures = [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(replies) if not ok]
        if failures:
            self.close()  # a failed rank may have left peers or shared state behind
            raise RankFailure("\n".join(failures))
        return [value for _, value in replies]

    def _grow(self, world_size: int) -> None:
        context = multiprocessing.get_context("spawn")
        while len(self._processes) < world_size:
            ours, theirs = context.Pipe()
            os.environ.setdefault("OMP_NUM_THREADS", "1")
            process = context.Process(
                target=_serve, args=(theirs, len(self._processes)), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append((process, ours))

    def _collect(self, world_size: int) -> list[tuple[bool, Any]]:
        replies: list[tuple[bool, Any]] = [(False, "no reply in time")] * world_size
        pending = {self._processes[rank][1]: rank for rank in range(world_size)}
        while pending:
            ready = wait(list(pending), timeout=JOB_TIMEOUT_S)
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = pending.pop(connection)
                try:
                    replies[rank] = cloudpickle.loads(connection.recv_bytes())
                except EOFError:
                    replies[rank] = (False, "the rank's process died")
        return replies

    def close(self) -> None:
        """End every rank process."""
        for process, connection in self._processes:
            connection.close()
            process.kill()
            process.join()
        self._processes.clear()
