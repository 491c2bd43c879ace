"""One parameter of a group, in its two forms: the rows held here, and the whole for compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from shoal.errors import WorkError
from shoal.fsdp.slot import Slot


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One parameter, however often it is registered (tied weights)."""

    slots: tuple[Slot, ...]

    compute: nn.Parameter
    """The module's own parameter, a view of the whole weights; registered while they are in use."""

    local: nn.Parameter
    """Main weights of the rows held here; registered at rest, and what the optimizer updates."""

    @classmethod
    def of(
        cls,
        slots: tuple[Slot, ...],
        original: nn.Parameter,
        *,
        rows: torch.Tensor,
        whole: torch.Tensor,
    ) -> Entry:
        """Register ``rows``, of the main weights, where ``original`` was; ``whole`` is a view."""
        local = nn.Parameter(rows, requires_grad=original.requires_grad)
        compute = original
        if original.device.type != rows.device.type:
            compute = nn.Parameter(rows.new_empty(0), original.requires_grad)
            compute.__dict__.update(original.__dict__)
        compute.grad = None
        # Unlike a parameter made of the view this one does not share the buffer's version counter,
        # so a gather between forward and backward does not look like a change of weights.
        compute.data = whole
        for slot in slots:
            slot.swap(original, local)
        return cls(slots=slots, compute=compute, local=local)

    @property
    def path(self) -> str:
        """Its name from the unit's module on, or one of them."""
        return self.slots[0].path

    def check(self) -> None:
        """Raise ``WorkError`` if somebody else's tensor is registered."""
        for slot in self.slots:
            slot.check(self.local)

    def open(self) -> None:
        """Register the whole for compute."""
        for slot in self.slots:
            slot.swap(self.local, self.compute)

    def close(self) -> None:
        """Register the rows held here."""
        for slot in self.slots:
            slot.swap(self.compute, self.local)

    def watch(self, arrive: Callable[[torch.Tensor], None]) -> None:
        """Call ``arrive`` with each gradient of the whole; refuse uses that see the rows alone."""
        path = self.path

        def take(parameter: torch.Tensor) -> None:
            gradient = parameter.grad
            assert gradient is not None
            parameter.grad = None
            arrive(gradient)

        def refuse(_: torch.Tensor) -> None:
            raise WorkError(
                f"Parameter {path} was used outside the forward of the unit that owns it, where it "
                "is this rank's rows of the main weights: make its user part of the unit."
            )

        self.compute.register_post_accumulate_grad_hook(take)
        self.local.register_hook(refuse)
