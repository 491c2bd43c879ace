"""How a driver tells the ranks of an attempt to save their next step and to end.

    driver ── order ──► Ray's key-value store ◄── asks, once a second ── rank 0
                                                        │ told
                        all ranks end after one step ◄──┘ (``shoal.training.train``)

Not a file of the run's folder: a network's file system may show one a minute late.
"""

from __future__ import annotations

import logging
import threading
import uuid
from dataclasses import dataclass, field
from typing import Self

from ray.exceptions import RayError
from ray.experimental.internal_kv import (
    _internal_kv_del,
    _internal_kv_exists,
    _internal_kv_put,
)

from shoal.rounds import Rounds

PERIOD_S = 1.0
"""Seconds between two questions."""

_NAMESPACE = b"shoal"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The order to end that may come to one attempt; travels to its workers."""

    key: str = field(default_factory=lambda: f"cut-{uuid.uuid4().hex}")
    """Its name in the store."""

    def order(self) -> None:
        """Tell the ranks."""
        _internal_kv_put(self.key, b"", namespace=_NAMESPACE)

    def __enter__(self) -> Self:
        """Begin an attempt."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Take the order away, now that the attempt is over."""
        _internal_kv_del(self.key, namespace=_NAMESPACE)

    @property
    def is_ordered(self) -> bool:
        """Whether it was given."""
        return bool(_internal_kv_exists(self.key, namespace=_NAMESPACE))


class CutWatch(Rounds):
    """Asks for the order in a thread of a rank, while the ``with`` block lasts."""

    def __init__(self, cut: Cut) -> None:
        super().__init__(self._ask, every_s=PERIOD_S, name="cut-watch")
        self._cut = cut
        self._told = threading.Event()

    def is_told(self) -> bool:
        """Whether the order has come; takes no time."""
        return self._told.is_set()

    def _ask(self) -> None:
        try:
            if self._cut.is_ordered:
                self._told.set()
                self.stop()
        except RayError as error:  # the head is away for a moment, and the rank itself is well
            logger.warning("could not ask whether to end: %s", error)
