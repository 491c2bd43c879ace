"""Writing a Hugging Face folder that ``transformers`` and vLLM load.

The folder appears under its name only when it is complete: it is written beside it and renamed.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from shoal.errors import ConfigError, WorkError
from shoal.models.config import DecoderConfig
from shoal.models.hf_folder import CONFIG, INDEX, SINGLE
from shoal.models.names import EXPERT_BIAS, ExpertLayout, file_layout, tensor_shapes

MAX_SHARD_BYTES = 5 * 10**9

CARRIED_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
"""Files beside the weights that go along with a model."""

_DTYPE_NAMES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}


def write_hf_folder(
    out: Path,
    config: DecoderConfig,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    dtype: torch.dtype | None = None,
    expert_layout: ExpertLayout = ExpertLayout.SEPARATE,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    carry_from: Path | None = None,
    add_files: Callable[[Path], None] | None = None,
) -> None:
    """Write ``out`` with config, weights and, from ``carry_from``, tokenizer and templates.

    ``add_files`` is called with the unfinished folder to add more files.

    ``tensors`` gives every parameter of the decoder once and whole, by its canonical name, in any
    order, biases that choose experts included. Those are written in fp32, all others in ``dtype``,
    or each in its own where that is unset, a file at a time, so that never more than
    ``max_shard_bytes`` and one parameter are held. Raises ``ConfigError`` if ``out`` has content
    already or ``dtype`` is no float of at least 16 bits, and ``WorkError`` for a parameter that is
    absent, repeated, unknown or wrongly shaped and for a disk without room.
    """
    if dtype is not None and dtype not in _DTYPE_NAMES:
        raise ConfigError("dtype", str(dtype), "files hold floats only", "Take fp32, bf16 or fp16")
    with new_folder(out) as folder:
        if carry_from is not None:
            carry_files(carry_from, folder)
        if add_files is not None:
            add_files(folder)
        writer = _Writer(folder, config, expert_layout, dtype, max_shard_bytes)
        for name, tensor in tensors:
            writer.add(name, tensor)
        write_config(folder, config, writer.finish())


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to fill that becomes ``out`` when all went well and vanishes otherwise."""
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError("OUT", str(out), "it exists and is not an empty folder", "Name a new one")
    folder = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
        folder.chmod(0o755)  # mkdtemp's folder is for its owner alone
        yield folder
        folder.replace(out)
    except OSError as error:
        raise WorkError(f"{out} cannot be written: {error}") from error
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def check_room(folder: Path, shapes: Iterable[torch.Size], dtype: torch.dtype) -> None:
    """Raise ``WorkError`` where the disk of a new folder has no room for tensors in ``dtype``."""
    needed = sum(math.prod(shape) for shape in shapes) * dtype.itemsize
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise WorkError(f"{folder.parent} has {free} bytes free, the weights take {needed}")


def write_config(folder: Path, config: DecoderConfig, dtype: torch.dtype) -> None:
    """Write ``config.json``: what was given, with the architecture and the weights' dtype."""
    values: dict[str, Any] = {k: v for k, v in config.hf.items() if k != "torch_dtype"}
    values["architectures"] = [config.architecture]
    values["tie_word_embeddings"] = config.tie_word_embeddings
    values["dtype"] = _DTYPE_NAMES[dtype]
    write_json(folder / CONFIG, values)


def write_json(path: Path, value: object) -> None:
    """Write readable JSON."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def carry_files(source: Path, folder: Path) -> None:
    """Copy tokenizer, chat template and generation config, those that ``source`` has."""
    for name in CARRIED_FILES:
        if (Path(source) / name).is_file():
            shutil.copyfile(Path(source) / name, folder / name)


class _Writer:
    """Collects file tensors and writes a file whenever enough are there."""

    def __init__(
        self,
        folder: Path,
        config: DecoderConfig,
        layout: ExpertLayout,
        dtype: torch.dtype | None,
        max_shard_bytes: int,
    ) -> None:
        self._folder = folder
        self._dtype = dtype
        self._max_shard_bytes = max_shard_bytes
        self._shapes = tensor_shapes(config)
        self._pieces = file_layout(config, self._shapes, layout)
        self._waiting = set(self._shapes)
        self._pending: dict[str, torch.Tensor] = {}
        self._shards: list[list[str]] = []
        self._total_bytes = 0
        self._main_dtype = dtype
        check_room(folder, self._shapes.values(), dtype or torch.bfloat16)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take one whole parameter."""
        self._check(name, tensor)
        self._waiting.remove(name)
        dtype = self._dtype or tensor.dtype
        if name.endswith(EXPERT_BIAS):
            dtype = torch.float32  # its steps are too small for less
        else:
            self._main_dtype = self._main_dtype or dtype
        for piece in self._pieces[name]:
            part = tensor[piece.row_start : piece.row_start + piece.num_rows]
            # A copy: the file format takes no tensors that share memory.
            part = part.detach().to("cpu", dtype, copy=True).reshape(piece.shape).contiguous()
            if self._pending and self._pending_bytes() + part.nbytes > self._max_shard_bytes:
                self._flush()
            self._pending[piece.name] = part

    def finish(self) -> torch.dtype:
        """Write what is left and the index; returns the dtype of the first parameter."""
        if self._waiting:
            raise WorkError(f"{min(self._waiting)} never came; the weights are incomplete")
        self._flush()
        _name_shards(self._folder, self._shards, self._total_bytes)
        assert self._main_dtype is not None
        return self._main_dtype

    def _pending_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._pending.values())

    def _flush(self) -> None:
        path = _shard_path(self._folder, len(self._shards))
        try:
            save_file(self._pending, path, metadata={"format": "pt"})
        except SafetensorError as error:
            raise WorkError(f"{path} cannot be written: {error}") from error
        path.chmod(0o644)  # safetensors makes files that only their owner may read
        self._shards.append(list(self._pending))
        self._total_bytes += self._pending_bytes()
        self._pending.clear()

    def _check(self, name: str, tensor: torch.Tensor) -> None:
        if name not in self._shapes:
            raise WorkError(f"{name} is not a parameter of this model; its config does not fit")
        if name not in self._waiting:
            raise WorkError(f"{name} came twice")
        if tensor.shape != self._shapes[name]:
            raise WorkError(
                f"{name} has the shape {tuple(tensor.shape)}, "
                f"the config asks for {tuple(self._shapes[name])}"
            )
        if tensor.dtype not in _DTYPE_NAMES:
            raise WorkError(f"{name} has the dtype {tensor.dtype}, which is no float")


def _shard_path(folder: Path, shard: int) -> Path:
    return folder / f"shard-{shard}.safetensors"


def _name_shards(folder: Path, shards: list[list[str]], total_bytes: int) -> None:
    """Give the files their final names, which tell how many there are, and write the index."""
    if len(shards) == 1:
        _shard_path(folder, 0).rename(folder / SINGLE)
        return
    weight_map: dict[str, str] = {}
    for shard, names in enumerate(shards):
        file_name = f"model-{shard + 1:05}-of-{len(shards):05}.safetensors"
        _shard_path(folder, shard).rename(folder / file_name)
        weight_map.update(dict.fromkeys(names, file_name))
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    write_json(folder / INDEX, index)
