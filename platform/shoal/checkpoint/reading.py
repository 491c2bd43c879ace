"""Reading rows out of a checkpoint's files through DCP's reader."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from shoal.checkpoint.entry import Entry
from shoal.checkpoint.shard import unpack


class CheckpointReader:
    """One checkpoint's global tensors, read by rows; for this process alone."""

    def __init__(self, path: Path) -> None:
        """Read the metadata, which is a pickle: check the folder's checksums before."""
        self._reader = FileSystemReader(path)
        self._metadata: Metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)

    @property
    def keys(self) -> dict[str, TensorStorageMetadata | BytesStorageMetadata]:
        """Shape, dtype and chunks of every global tensor by key."""
        return self._metadata.state_dict_metadata

    def path(self, key: str) -> tuple[str, ...]:
        """Parts of a key."""
        return tuple(self._metadata.planner_data[key])

    def fill(self, entries: Sequence[Entry]) -> None:
        """Read the rows of each entry into ``entry.local``, converting between float formats."""
        planner = _RowsPlanner(self._metadata, entries)
        self._reader.read_data(planner.create_local_plan(), planner).wait()

    def tensor(self, key: str) -> torch.Tensor:
        """One whole tensor, in its dtype on the disk."""
        stored = self.keys[key]
        assert isinstance(stored, TensorStorageMetadata)
        value = torch.empty(stored.size, dtype=stored.properties.dtype)
        self.fill(
            [Entry(path=self.path(key), shape=stored.size, row_start=0, local=value, primary=False)]
        )
        return value

    def value(self, key: str) -> Any:
        """What is no tensor."""
        planner = _RowsPlanner(self._metadata, [], blobs=[key])
        self._reader.read_data(planner.create_local_plan(), planner).wait()
        return planner.values[key]


class _RowsPlanner(DefaultLoadPlanner):
    """Plans from explicit rows: whatever chunks were saved, only those that overlap are read."""

    def __init__(
        self, metadata: Metadata, entries: Sequence[Entry], blobs: Sequence[str] = ()
    ) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._stored = metadata.state_dict_metadata
        self.values: dict[str, Any] = {}
        self._entries = {entry.key: entry for entry in entries}
        self._blobs = blobs

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for key, entry in self._entries.items():
            stored = self._stored[key]
            assert isinstance(stored, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(key, stored, [entry.chunk])
        items += [_blob_item(key) for key in self._blobs]
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self._entries[index.fqn].local

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.values[read_item.dest_index.fqn] = unpack(value.getvalue())


def _blob_item(key: str) -> ReadItem:
    nowhere = torch.Size([0])
    return ReadItem(
        type=LoadItemType.BYTE_IO,
        dest_index=MetadataIndex(key),
        dest_offsets=nowhere,
        storage_index=MetadataIndex(key),
        storage_offsets=nowhere,
        lengths=nowhere,
    )
