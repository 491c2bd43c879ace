"""Ends a text before the first stop string in it, and shows none of it before that is sure."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Watches one growing text for ``stops``, none of them empty.

    The stop string that is complete first ends the text; of several that are complete with the
    same character, the longest. How the text was cut into deltas makes no difference.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, delta: str) -> str:
        """Give what may be shown after ``delta``; nothing more comes once ``matched`` is set."""
        assert self.matched is None, "the text has ended"
        text = self._held + delta
        found = [(text.find(stop) + len(stop), stop) for stop in self._stops if stop in text]
        if found:
            end, self.matched = min(found, key=lambda each: (each[0], -len(each[1])))
            self._held = ""
            return text[: end - len(self.matched)]
        num_held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def finish(self) -> str:
        """Give what was held back: the text ended, and it was no stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of ``text`` that are the beginning of ``stop``."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
