"""Aborts that overtook their requests."""

from __future__ import annotations

from collections import OrderedDict


class EarlyAborts:
    """Ids whose requests are to be dropped when they come; only the last ``most`` are kept."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._ids: OrderedDict[str, None] = OrderedDict()

    def note(self, request_id: str) -> None:
        """Keep ``request_id`` in mind."""
        self._ids[request_id] = None
        self._ids.move_to_end(request_id)
        if len(self._ids) > self._most:
            self._ids.popitem(last=False)

    def take(self, request_id: str) -> bool:
        """Whether ``request_id`` was kept in mind; it is no longer."""
        if request_id not in self._ids:
            return False
        del self._ids[request_id]
        return True
