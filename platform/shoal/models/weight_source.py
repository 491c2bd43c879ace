"""The seam to wherever a decoder's weights come from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch


class WeightSource(Protocol):
    """Weights of a whole decoder, read by rows: a folder, a checkpoint, or initial values.

    Names are the canonical parameter names of the decoder; a tied head is not among them.
    """

    def shapes(self) -> Mapping[str, torch.Size]:
        """Whole shape of every parameter on offer."""

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows ``start`` to ``stop`` (dimension 0) of a parameter, in any dtype, on the CPU.

        The caller asks for the rows it needs and no others, each once.
        """


def whole_tensors(source: WeightSource) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter of a source, one at a time."""
    for name, shape in source.shapes().items():
        yield name, source.rows(name, 0, shape[0])
