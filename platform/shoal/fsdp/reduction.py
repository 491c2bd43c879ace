"""The one way that partial results become a sum: in rank order, in the dtype asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_CHUNK_NUMEL = 1 << 17
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
        scratch = torch.empty(2, min(numel, _CHUNK_NUMEL), dtype=self.accumulate_dtype)
        for start in range(0, numel, _CHUNK_NUMEL):
            stop = min(start + _CHUNK_NUMEL, numel)
            total, next_part = scratch[:, : stop - start]
            total.copy_(parts[0][start:stop])
            for part in parts[1:]:
                total.add_(next_part.copy_(part[start:stop]))
            self.write(output[start:stop], total)

    @torch.no_grad()
    def write(self, output: torch.Tensor, total: torch.Tensor) -> None:
        """Bring ``total``, the sum of all ranks' parts, into ``output``; both are ``[numel]``.

        What ``total`` held is lost.
        """
        if self.divisor == 1.0:
            result = total
        elif self.add or output.dtype != total.dtype:
            result = total.div_(self.divisor)
        else:
            torch.div(total, self.divisor, out=output)
            return
        if self.add:
            output.add_(result)
        else:
            output.copy_(result)
