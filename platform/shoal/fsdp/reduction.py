"""The one way that partial results become a sum: in rank order, in the dtype asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_CHUNK_NUMEL = 1 << 15
"""Elements summed at a time: the scratch then stays in the core's own cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """What happens to the partial results of all ranks on their way into an output."""

    accumulate_dtype: torch.dtype
    """Each partial is cast to this dtype before it is added."""

    divisor: float = 1.0
    """The sum is divided by this, in ``accumulate_dtype``."""

    add: bool = False
    """Whether the result is added to the output rather than written over it."""

    @torch.no_grad()
    def into(self, output: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        """Sum ``parts``, one ``[numel]`` tensor a rank in rank order, into ``output`` ``[numel]``.

        ``output`` may be one of the parts.
        """
        numel = output.numel()
        scratch = torch.empty(min(numel, _CHUNK_NUMEL), dtype=self.accumulate_dtype)
        for start in range(0, numel, _CHUNK_NUMEL):
            stop = min(start + _CHUNK_NUMEL, numel)
            total = scratch[: stop - start]
            total.copy_(parts[0][start:stop])
            for part in parts[1:]:
                total.add_(part[start:stop].to(self.accumulate_dtype))
            if self.divisor != 1.0:
                total.div_(self.divisor)
            if self.add:
                output[start:stop].add_(total)
            else:
                output[start:stop].copy_(total)
