"""Saving while the run waits."""

from __future__ import annotations

from shoal.checkpoint.failure import OnFailure, SaveReport
from shoal.checkpoint.save import save_state
from shoal.checkpoint.saver import Saver
from shoal.checkpoint.state import State
from shoal.errors import WorkError
from shoal.storage import prune_or_warn


class DirectSaver(Saver):
    """See ``Saver``; needs no memory for copies."""

    def save(self, step: int, state: State) -> None:
        """See ``Saver``."""
        for is_last in (self.on_failure is not OnFailure.RETRY, True):
            try:
                saved = save_state(self.folder, step, state, group=self.group)
            except WorkError as error:
                self._failed = (step, str(error))
                self._tell(SaveReport(step=step, error=str(error), is_tried_again=not is_last))
                if is_last and self.on_failure is not OnFailure.WARN:
                    raise
                if is_last:
                    return
            else:
                self._failed = None
                self._tell(
                    SaveReport(
                        step=step,
                        path=saved.path,
                        num_bytes=saved.num_bytes,
                        seconds=saved.seconds,
                        stall_s=saved.seconds,
                    )
                )
                # Not left to the first rank alone: the others would wait for it in the next step.
                self._peers.each(f"Deleting older steps in {self.folder}", self._prune)
                return

    def poll(self) -> None:
        """See ``Saver``. Everything is told by then."""

    def settle(self) -> None:
        """See ``Saver``. Nothing is under way by then."""

    def _prune(self) -> None:
        if self._peers.first:
            prune_or_warn(self.folder, self.keep)

    def _let_go(self, error: BaseException | None) -> None:
        """See ``Saver``. Nothing is held."""
