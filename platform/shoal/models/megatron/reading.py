"""Reading a Megatron checkpoint by rows of our parameters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from shoal.errors import ConfigError, WorkError
from shoal.models.config import DecoderConfig
from shoal.models.hf_folder import CONFIG, read_hf_config
from shoal.models.megatron.arguments import read_arguments
from shoal.models.megatron.config import check_dense_gpt, hf_config_of
from shoal.models.megatron.folder import COMMON, HF, iteration_folder
from shoal.models.megatron.names import PADDED, TABLE, MegatronTensor, Run, megatron_tensors
from shoal.models.names import parameter_shapes

_PARTS = ("decoder.", "embedding.", "output_layer.")
"""What names of a model's tensors begin with; an optimizer's begin otherwise."""


class MegatronWeights:
    """A ``WeightSource`` over a distributed checkpoint of a dense GPT, saved at any layout.

    The model is what ``hf/config.json`` or ``config.json`` in the iteration's folder says, else
    Megatron's arguments. Raises ``ConfigError`` where there is neither, for another format or
    model, and for tensors that are absent, too many or of another shape.
    """

    def __init__(self, folder: Path) -> None:
        """``folder`` is a checkpoint, of which the newest iteration counts, or one iteration."""
        self._folder = iteration_folder(folder)
        self._reader = FileSystemReader(self._folder)
        try:
            self._metadata = self._reader.read_metadata()
        except FileNotFoundError:
            raise WorkError(f"{self._folder} lacks .metadata; copy it again") from None
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        stored = self._metadata.state_dict_metadata.items()
        self._stored = {k: v for k, v in stored if isinstance(v, TensorStorageMetadata)}
        self.config = self._config()
        self._shapes = parameter_shapes(self.config)
        self._places: dict[str, list[tuple[MegatronTensor, int, Run]]] = {}
        """Of each parameter the runs of its rows, with their place in a tensor."""
        self._check()

    @property
    def companions(self) -> Path | None:
        """A folder with tokenizer files, if there is one."""
        return self._folder / HF if (self._folder / HF).is_dir() else None

    def shapes(self) -> Mapping[str, torch.Size]:
        """Whole shape of every parameter, by the decoder's names."""
        return self._shapes

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows ``start`` to ``stop`` of a parameter in the file's dtype."""
        wanted = []
        for tensor, place, run in self._places[name]:
            first, last = max(start, run.row_start), min(stop, run.row_start + run.num_rows)
            if first < last:
                shift = place - run.row_start
                wanted.append((tensor, first + shift, last + shift))
        if not wanted:
            return torch.empty(0, *self._shapes[name][1:])
        # All runs of a parameter are in one tensor, of which the span around them is read once.
        low, high = wanted[0][1], wanted[-1][2]
        span = self._read(wanted[0][0], low, high)
        parts = [span[first - low : last - low] for _, first, last in wanted]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _config(self) -> DecoderConfig:
        for folder in (self._folder / HF, self._folder):
            if (folder / CONFIG).is_file():
                config = DecoderConfig.from_hf(read_hf_config(folder))
                break
        else:
            arguments = read_arguments(self._folder / COMMON)
            if arguments is None:
                raise self._error(
                    f"neither {COMMON} nor a {CONFIG} beside it says what model it is",
                    f"Put the model's Hugging Face {CONFIG} into {self._folder}",
                )
            if getattr(arguments, "padded_vocab_size", None) is None and TABLE in self._stored:
                arguments.padded_vocab_size = self._stored[TABLE].size[0]
            config = DecoderConfig.from_hf(hf_config_of(arguments, str(self._folder)))
        check_dense_gpt(config)
        return config

    def _check(self) -> None:
        asked = set()
        for tensor in megatron_tensors(self.config):
            asked.add(self._key(tensor))
            self._check_shape(tensor)
            place = 0
            for run in tensor.runs:
                self._places.setdefault(run.name, []).append((tensor, place, run))
                place += run.num_rows
        for runs in self._places.values():
            runs.sort(key=lambda entry: entry[2].row_start)
        for key in sorted(self._stored.keys() - asked):
            if key.startswith(_PARTS):
                raise self._error(
                    f"the model has no place for {key}", "Give a dense GPT of a supported family"
                )

    def _check_shape(self, tensor: MegatronTensor) -> None:
        key = self._key(tensor)
        if key not in self._stored:
            raise self._error(f"it has no {key}", "Give a dense GPT with all of its tensors")
        shape = tuple(self._stored[key].size)
        stack = (self.config.num_layers,) if self._is_stacked(tensor) else ()
        wanted = (*stack, tensor.num_rows, *tensor.width)
        padded = tensor.key in PADDED and shape[0] >= tensor.num_rows and shape[1:] == wanted[1:]
        if shape != wanted and not padded:
            raise self._error(
                f"the shape of {key} is {shape}, the model asks for {wanted}",
                "Give the config of these weights",
            )
        if not self._stored[key].properties.dtype.is_floating_point:
            raise self._error(f"{key} holds no floats", "Give weights in fp32, bf16 or fp16")

    def _is_stacked(self, tensor: MegatronTensor) -> bool:
        return tensor.layer is not None and tensor.key in self._stored

    def _key(self, tensor: MegatronTensor) -> str:
        """Its name here, where layers may be stacked or not."""
        if tensor.layer is None or tensor.key in self._stored:
            return tensor.key
        return tensor.key_of_layer

    def _read(self, tensor: MegatronTensor, start: int, stop: int) -> torch.Tensor:
        key = self._key(tensor)
        stack = (tensor.layer or 0,) if self._is_stacked(tensor) else ()
        offsets = torch.Size([*stack, start, *(0 for _ in tensor.width)])
        sizes = torch.Size([*(1 for _ in stack), stop - start, *tensor.width])
        block = torch.empty(sizes, dtype=self._stored[key].properties.dtype)
        chunk = ChunkStorageMetadata(offsets=offsets, sizes=sizes)
        planner = _BlockPlanner(key, self._stored[key], chunk, block)
        try:
            self._reader.read_data(planner.create_local_plan(), planner).wait()
        except (OSError, RuntimeError, EOFError) as error:
            raise WorkError(f"{self._folder} cannot be read ({error}); copy it again") from error
        return block[0] if stack else block

    def _error(self, problem: str, remedy: str) -> ConfigError:
        return ConfigError("SOURCE", str(self._folder), problem, remedy)


class _BlockPlanner(DefaultLoadPlanner):
    """Reads one block of one tensor, from whatever chunks were saved."""

    def __init__(
        self,
        key: str,
        stored: TensorStorageMetadata,
        chunk: ChunkStorageMetadata,
        block: torch.Tensor,
    ) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._items = create_read_items_for_chunk_list(key, stored, [chunk])
        self._block = block

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan(self._items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self._block
