"""Names the rank that others wait for, while they still wait.

Nothing is ended here: a straggler may yet arrive. What does not, is ended by ``cluster.silence_s``
or by the timeout of the collective that its peers wait in.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from shoal.rounds import Rounds
from shoal_actors.train.hang import furthest_behind
from shoal_actors.train.pulse import PERIOD_S, Sign, read_signs


class Lookout(Rounds):
    """Reads the signs of a run's ranks, in a thread of the driver, while the block lasts."""

    def __init__(
        self,
        folder: Path,
        *,
        num_ranks: int,
        patience_s: float,
        on_straggler: Callable[[Sign, float], None],
    ) -> None:
        """``folder`` holds the run's logs.

        ``on_straggler`` is called, once for each rank and step, with a rank that others have
        waited for during ``patience_s`` and with the seconds that the one waiting longest waited.
        """
        super().__init__(lambda: self.look(time.monotonic()), every_s=PERIOD_S, name="lookout")
        self._folder = folder
        self._num_ranks = num_ranks
        self._patience_s = patience_s
        self._on_straggler = on_straggler
        self._beats: dict[int, tuple[int, int, float]] = {}
        self._told: set[tuple[int, int, int | None]] = set()

    def look(self, now: float) -> None:
        """Judge the signs as they are at ``now``, in seconds of any clock that goes on."""
        signs = read_signs(self._folder, self._num_ranks)
        quiet_s = {rank: self._quiet_s(sign, now) for rank, sign in signs.items()}
        lively = {r: sign for r, sign in signs.items() if quiet_s[r] < self._patience_s}
        waiting = [s for s in lively.values() if s.is_waiting and s.seconds >= self._patience_s]
        if not waiting:
            return
        silent = [signs[rank] for rank in signs if rank not in lively]
        straggler = silent[0] if silent else furthest_behind(lively)
        if straggler is None:
            return
        key = (straggler.rank, straggler.pid, straggler.step)
        if key not in self._told:
            self._told.add(key)
            self._on_straggler(straggler, max(sign.seconds for sign in waiting))

    def _quiet_s(self, sign: Sign, now: float) -> float:
        """For how long this sign has been the rank's last."""
        pid, beat, since = self._beats.get(sign.rank, (0, 0, now))
        if (pid, beat) != (sign.pid, sign.beat):
            since = now
        self._beats[sign.rank] = (sign.pid, sign.beat, since)
        return now - since
