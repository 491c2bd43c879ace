"""Reading a Hugging Face folder: its config and, slice by slice, its safetensors weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from shoal.errors import ConfigError, WorkError
from shoal.models.config import DecoderConfig
from shoal.models.names import Piece, file_layout, found_layout, tensor_shapes

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_FIELD = "model.path"
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
# Older files keep this constant of the config as a tensor of each layer.
_CONSTANTS = (".rotary_emb.inv_freq",)
_COMPARED_ROWS = 4096


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; raises ``ConfigError`` where there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            _FIELD,
            str(path.parent),
            f"there is no {path.name} in this folder",
            "Give the folder of a Hugging Face model; shoal export makes one of a run",
        ) from None
    except IsADirectoryError:
        raise ConfigError(_FIELD, str(path), "it is a folder", "Fetch the file again") from None
    except ValueError as error:  # no UTF-8, no JSON, or a number of too many digits
        raise ConfigError(
            _FIELD, str(path), f"it is not valid JSON: {error}", "Fetch the file again"
        ) from error
    except RecursionError:
        raise ConfigError(
            _FIELD, str(path), "it is not valid JSON: nested too deeply", "Fetch the file again"
        ) from None
    if not isinstance(value, dict):
        raise ConfigError(_FIELD, str(path), "it is not a JSON object", "Fetch the file again")
    return value


def read_hf_config(folder: Path) -> dict[str, Any]:
    """The ``config.json`` of a folder; raises ``ConfigError`` where there is none."""
    return read_json(Path(folder) / CONFIG)


class HFWeights:
    """A ``WeightSource`` over the safetensors files of a folder; only the asked slices are read.

    Knows experts in separate and in fused tensors. A folder is refused when it is made, by
    ``ConfigError`` or, for a damaged file, ``WorkError``: tensors missing, unexpected or of another
    shape than its config says, quantized ones, and a head of its own where the config calls it
    tied, unless it equals the embedding.
    """

    def __init__(self, folder: Path, config: DecoderConfig | None = None) -> None:
        """``config`` is read from the folder where unset."""
        self._folder = Path(folder)
        self.config = DecoderConfig.from_hf(read_hf_config(folder)) if config is None else config
        self._shapes = tensor_shapes(self.config)
        self._files = _open_files(self._folder)
        for name in [name for name in self._files if name.endswith(_CONSTANTS)]:
            del self._files[name]
        self.layout = found_layout(self._files)
        self._pieces = file_layout(self.config, self._shapes, self.layout)
        self._check()

    def shapes(self) -> Mapping[str, torch.Size]:
        """Whole shape of every parameter, by the decoder's names."""
        return self._shapes

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows ``start`` to ``stop`` of a parameter in the file's dtype."""
        parts = [
            part
            for piece in self._pieces[name]
            for part in self._piece_rows(piece, start - piece.row_start, stop - piece.row_start)
        ]
        if not parts:
            return torch.empty(0, *self._shapes[name][1:])
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _piece_rows(self, piece: Piece, start: int, stop: int) -> list[torch.Tensor]:
        """The part of a piece between rows of its own, in slices that stay within an expert."""
        start, stop = max(start, 0), min(stop, piece.num_rows)
        if start >= stop:
            return []
        tensor = self._slice(piece.name)
        if len(piece.shape) < 3:
            return [tensor[start:stop]]
        height = piece.shape[1]
        return [
            tensor[expert, max(start - expert * height, 0) : min(stop - expert * height, height)]
            for expert in range(start // height, (stop - 1) // height + 1)
        ]

    def _slice(self, name: str) -> Any:
        return self._files[name].get_slice(name)

    def _check(self) -> None:
        wanted = {piece.name: piece for pieces in self._pieces.values() for piece in pieces}
        present = set(self._files)
        if self.config.tie_word_embeddings and _HEAD in present:
            self._check_tied_head()
            present.discard(_HEAD)
        for name in wanted:
            if name not in present:
                raise self._error(name, "the folder has no such tensor", _remedy(name))
        for name in sorted(present - wanted.keys()):
            raise self._error(
                name, "the config asks for no such tensor", "Take the config of these weights"
            )
        for name, piece in wanted.items():
            tensor = self._slice(name)
            shape = tuple(tensor.get_shape())
            if shape != piece.shape:
                raise self._error(
                    name,
                    f"its shape is {shape}, the config asks for {piece.shape}",
                    "Take the config of these weights",
                )
            if tensor.get_dtype() not in _FLOATS:
                raise self._error(
                    name,
                    f"its format is {tensor.get_dtype()}",
                    "Give weights in fp32, bf16 or fp16",
                )

    def _check_tied_head(self) -> None:
        """Refuse a head that differs from the embedding: it would be lost."""
        if _EMBEDDING not in self._files:
            return  # reported as missing
        head, table = self._slice(_HEAD), self._slice(_EMBEDDING)
        equal = head.get_shape() == table.get_shape() and all(
            torch.equal(head[start : start + _COMPARED_ROWS], table[start : start + _COMPARED_ROWS])
            for start in range(0, head.get_shape()[0], _COMPARED_ROWS)
        )
        if not equal:
            raise self._error(
                _HEAD,
                "the config calls the head the embedding table, but this one differs from it",
                "Set tie_word_embeddings to false to keep both",
            )

    def _error(self, name: str, problem: str, remedy: str) -> ConfigError:
        return ConfigError(_FIELD, str(self._folder), f"{name}: {problem}", remedy)


def _remedy(name: str) -> str:
    if name == _HEAD:
        return "Set tie_word_embeddings to true if the head is the embedding table"
    return "Complete the folder, or take the config of these weights"


def _open_files(folder: Path) -> dict[str, Any]:
    """For each tensor, the open file that holds it."""
    files: dict[str, Any] = {}
    for path in _paths(folder):
        try:
            file = safe_open(path, framework="pt")
            names: list[str] = list(file.keys())  # type: ignore[no-untyped-call]
        except FileNotFoundError:
            raise ConfigError(
                _FIELD, str(path), "the index names this file, which is absent", "Fetch it"
            ) from None
        except (SafetensorError, OSError) as error:
            raise WorkError(f"{path} cannot be read ({error}); fetch it again") from error
        for name in names:
            if name in files:
                raise ConfigError(
                    _FIELD, str(path), f"{name} is in another file too", "Remove one of the two"
                )
            files[name] = file
    return files


def _paths(folder: Path) -> list[Path]:
    if (folder / INDEX).exists():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ConfigError(_FIELD, str(folder / INDEX), "it has no weight_map", "Fetch it again")
        if not all(isinstance(name, str) for name in weight_map.values()):
            problem = "its weight_map names a file that is no text"
            raise ConfigError(_FIELD, str(folder / INDEX), problem, "Fetch it again")
        return [folder / name for name in sorted(set(weight_map.values()))]
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    raise ConfigError(
        _FIELD,
        str(folder),
        f"there is neither {SINGLE} nor {INDEX} in this folder",
        "Give a folder with safetensors weights",
    )
