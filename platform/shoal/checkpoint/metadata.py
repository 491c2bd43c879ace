"""DCP's metadata of all that was written, so that torch's own tools read our checkpoints.

Chunks are explicit: the shards of a flat buffer are uneven, and DCP would otherwise take them for
even ones (and the sizes would still add up).
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from shoal.checkpoint.shard import Placed, Shard

METADATA_NAME = ".metadata"
"""Where DCP looks for its metadata."""


def dcp_metadata(shards: Sequence[Shard]) -> bytes:
    """The pickle that DCP reads first; ``shards`` tile every tensor."""
    keys: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    paths: dict[str, tuple[str, ...]] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for shard in shards:
        for placed in shard.placed:
            key = ".".join(placed.path)
            paths[key] = placed.path
            chunk = _chunk(placed)
            index = MetadataIndex(key, chunk.offsets if chunk else None)
            storage[index] = _StorageInfo(shard.name, placed.start, placed.num_bytes)
            if chunk is None or placed.dtype is None or placed.shape is None:
                keys[key] = BytesStorageMetadata()
                continue
            properties = TensorProperties(dtype=placed.dtype)
            tensor = keys.setdefault(
                key, TensorStorageMetadata(properties=properties, size=placed.shape, chunks=[])
            )
            assert isinstance(tensor, TensorStorageMetadata)
            tensor.chunks.append(chunk)
    metadata = Metadata(
        state_dict_metadata=keys,
        planner_data=paths,
        storage_data=storage,
        storage_meta=StorageMeta(),
        version=CURRENT_DCP_VERSION,
    )
    return pickle.dumps(metadata)


def _chunk(placed: Placed) -> ChunkStorageMetadata | None:
    """The rows, in DCP's words; none for a blob."""
    if placed.shape is None:
        return None
    offsets = [placed.row_start, *[0] * (len(placed.shape) - 1)] if placed.shape else []
    return ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=placed.sizes)
