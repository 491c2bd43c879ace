"""Writing a decoder as a Megatron checkpoint, a tensor at a time."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from shoal.errors import WorkError
from shoal.models.config import DecoderConfig
from shoal.models.export import carry_files, check_room, new_folder, write_config, write_json
from shoal.models.megatron.config import arguments_of, check_dense_gpt, padded_vocabulary
from shoal.models.megatron.folder import COMMON, FORMAT, HF, METADATA, RELEASE, TRACKER
from shoal.models.megatron.names import (
    LAYERS,
    PADDED,
    MegatronTensor,
    megatron_tensors,
)
from shoal.models.weight_source import WeightSource

_WITH_EXTRA_STATE = (
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)
"""Modules of a layer whose state beside weights, nothing here, Megatron asks for."""


def write_megatron_folder(
    out: Path,
    config: DecoderConfig,
    source: WeightSource,
    *,
    dtype: torch.dtype,
    carry_from: Path | None = None,
) -> None:
    """Write ``out`` for Megatron Core's GPT: weights in ``dtype``, without optimizer.

    The vocabulary is filled up with zero rows to a multiple of 128. Beside what Megatron reads lies
    ``hf``, with the Hugging Face config and, from ``carry_from``, the tokenizer. Raises
    ``ConfigError`` for a decoder that Megatron's dense GPT cannot be or an ``out`` with content,
    ``WorkError`` for a disk that fails.
    """
    check_dense_gpt(config)
    with new_folder(out) as folder:
        release = folder / RELEASE
        (release / HF).mkdir(parents=True)
        check_room(release, source.shapes().values(), dtype)
        if carry_from is not None:
            carry_files(carry_from, release / HF)
        write_config(release / HF, config, dtype)
        _write_tensors(release, config, source, dtype)
        write_json(release / METADATA, FORMAT)
        common = {"args": arguments_of(config, dtype), "iteration": 0, "checkpoint_version": 3.0}
        torch.save(common, release / COMMON)
        (folder / TRACKER).write_text(f"{RELEASE}\n", encoding="utf-8")


def _write_tensors(
    folder: Path, config: DecoderConfig, source: WeightSource, dtype: torch.dtype
) -> None:
    tensors = {_index(tensor): tensor for tensor in megatron_tensors(config)}

    def made(index: MetadataIndex) -> torch.Tensor:
        return _assembled(tensors[index], source, dtype, _shape(tensors[index], config))

    items = [_item(tensor, config, dtype) for tensor in tensors.values()]
    planner = _Planner([*items, *_extra_states(config)], made)
    writer = FileSystemWriter(folder, thread_count=1)
    writer.set_up_storage_writer(is_coordinator=True)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([plan])
    try:
        results = writer.write_data(writer.prepare_global_plan(plans)[0], planner).wait()
        writer.finish(metadata, [results])
    except RuntimeError as error:  # what torch.save makes of a disk that refuses
        raise WorkError(f"{folder.parent} cannot be written: {error}") from error


def _assembled(
    tensor: MegatronTensor, source: WeightSource, dtype: torch.dtype, shape: torch.Size
) -> torch.Tensor:
    """A layer's part of a stack, or a whole tensor; each of our parameters is read once."""
    stops: dict[str, int] = {}
    for run in tensor.runs:
        stops[run.name] = max(stops.get(run.name, 0), run.row_start + run.num_rows)
    whole = {name: source.rows(name, 0, stop) for name, stop in stops.items()}
    filled = torch.zeros(shape, dtype=dtype)
    target = filled if tensor.layer is None else filled[0]
    place = 0
    for run in tensor.runs:
        rows = whole[run.name][run.row_start : run.row_start + run.num_rows]
        target[place : place + run.num_rows].copy_(rows)
        place += run.num_rows
    return filled


def _index(tensor: MegatronTensor) -> MetadataIndex:
    return MetadataIndex(tensor.key, _offsets(tensor))


def _offsets(tensor: MegatronTensor) -> torch.Size:
    inside = [0] * (1 + len(tensor.width))
    return torch.Size(inside if tensor.layer is None else [tensor.layer, *inside])


def _shape(tensor: MegatronTensor, config: DecoderConfig) -> torch.Size:
    """Of what is written at once."""
    rows = tensor.num_rows
    if tensor.key in PADDED:
        rows = padded_vocabulary(config.vocab_size)
    return torch.Size([*(() if tensor.layer is None else (1,)), rows, *tensor.width])


def _item(tensor: MegatronTensor, config: DecoderConfig, dtype: torch.dtype) -> WriteItem:
    shape = _shape(tensor, config)
    whole = shape if tensor.layer is None else torch.Size([config.num_layers, *shape[1:]])
    return WriteItem(
        index=_index(tensor),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=_offsets(tensor), sizes=shape),
            properties=TensorProperties(dtype=dtype),
            size=whole,
        ),
    )


def _extra_states(config: DecoderConfig) -> Iterator[WriteItem]:
    for module in _WITH_EXTRA_STATE:
        for layer in range(config.num_layers):
            key = f"{LAYERS}{module}._extra_state/shard_{layer}_{config.num_layers}"
            yield WriteItem(index=MetadataIndex(key), type=WriteItemType.BYTE_IO)


class _Planner(SavePlanner):
    """Makes each tensor when its turn to be written comes."""

    def __init__(
        self, items: list[WriteItem], make: Callable[[MetadataIndex], torch.Tensor]
    ) -> None:
        self._items = items
        self._make = make

    def set_up_planner(
        self, state_dict: object, storage_meta: object = None, is_coordinator: bool = False
    ) -> None:
        """Nothing: all is known."""

    def create_local_plan(self) -> SavePlan:
        return SavePlan(self._items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if write_item.type is not WriteItemType.BYTE_IO:
            index = write_item.index
            return self._make(MetadataIndex(index.fqn, index.offset))
        nothing = io.BytesIO()
        torch.save([None], nothing)  # as Megatron saves the state of a module without any
        return nothing
