"""A checkpoint's weights for whoever reads them by rows, without optimizer or process group."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from shoal.checkpoint.entry import Entry
from shoal.checkpoint.index import StoredTensor
from shoal.checkpoint.reading import CheckpointReader
from shoal.errors import WorkError
from shoal.storage import Location, verify


class CheckpointWeights:
    """The model's tensors in a checkpoint: a ``WeightSource`` of ``shoal.models``.

    Every byte of the checkpoint is checked when it is made: WorkError names a damaged file.
    """

    def __init__(self, path: Location) -> None:
        problems = verify(path)
        if problems:
            raise WorkError(f"{problems[0]}: {path} is damaged. Take another step.")
        self._reader = CheckpointReader(path)

    def shapes(self) -> Mapping[str, torch.Size]:
        """Whole shape of every tensor by its name in the model."""
        return {
            self._reader.path(key)[1]: stored.shape
            for key, stored in self._reader.keys.items()
            if key.startswith("model.") and isinstance(stored, StoredTensor)
        }

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows ``start`` to ``stop`` (dimension 0) in the dtype of the main weights."""
        stored = self._reader.keys[f"model.{name}"]
        assert isinstance(stored, StoredTensor)
        rows = torch.empty(stop - start, *stored.shape[1:], dtype=stored.dtype)
        entry = Entry(path=("model", name), shape=stored.shape, row_start=start, local=rows)
        self._reader.fill([entry])
        return rows
