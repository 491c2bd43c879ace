"""The groups whose gradients are on their way to other ranks."""

from __future__ import annotations

import weakref

from shoal.fsdp.group import ParameterGroup


class Reducing:
    """Starts reductions in the order of backward, and sees them to their ends."""

    def __init__(self, *, overlap: bool) -> None:
        """Without ``overlap`` each is waited for as soon as it is started."""
        self._overlap = overlap
        self._groups: list[weakref.ref[ParameterGroup]] = []

    def start(self, group: ParameterGroup, *, is_last: bool) -> None:
        """Bring what backward made on its way; ``is_last`` says that no microbatch follows."""
        if group.gradients is None:
            return
        group.start_reduce(is_last=is_last)
        if self._overlap:
            self._groups.append(weakref.ref(group))
        else:
            group.finish_reduce()

    def advance(self) -> None:
        """Let those of several stages go on to their next."""
        groups = [(reference, reference()) for reference in self._groups]
        self._groups = [
            reference for reference, group in groups if group is not None and group.advance_reduce()
        ]

    def finish(self) -> None:
        """Have all reduced gradients in place."""
        for reference in self._groups:
            group = reference()
            if group is not None:
                group.finish_reduce()
        self._groups.clear()
