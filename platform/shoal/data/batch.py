"""The sequences that one rank computes at a time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

import numpy as np
import torch

from shoal.data.dataset import SequenceDataset


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """b sequences of S tokens; every tensor is int64 [b, S], as in ``Sample``."""

    tokens: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor
    documents: torch.Tensor

    @classmethod
    def load(cls, dataset: SequenceDataset, ids: Iterable[int]) -> Batch:
        """Read the sequences ``ids``, at least one."""
        samples = [dataset[int(number)] for number in ids]
        return cls(
            **{
                field.name: torch.from_numpy(
                    np.stack([getattr(sample, field.name) for sample in samples])
                )
                for field in fields(cls)
            }
        )

    def to(self, device: torch.device) -> Batch:
        """Copy to ``device``."""
        moved = {field.name: getattr(self, field.name).to(device) for field in fields(self)}
        return Batch(**moved)
