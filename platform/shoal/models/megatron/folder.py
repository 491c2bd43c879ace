"""What lies where in the folder of a Megatron checkpoint.

latest_checkpointed_iteration.txt      "10", or "release" for weights alone
iter_0000010/ or release/
    metadata.json                      which format: torch_dist
    .metadata, __0_0.distcp, ...       the tensors, as torch.distributed.checkpoint writes them
    common.pt                          Megatron's arguments, the iteration
    hf/                                ours alone: Hugging Face config and tokenizer
"""

from __future__ import annotations

import json
from pathlib import Path

from shoal.errors import ConfigError, WorkError

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
METADATA = "metadata.json"
COMMON = "common.pt"
HF = "hf"
FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
"""What ``metadata.json`` says."""

_OLD_FORMAT = "mp_rank_*"
"""A file of pickled modules for each tensor- and pipeline-parallel rank."""


def is_megatron(folder: Path) -> bool:
    """Whether a folder looks like such a checkpoint, or one iteration of it, of any format."""
    marks = (TRACKER, COMMON, METADATA)
    return any((folder / mark).exists() for mark in marks) or any(
        any(folder.glob(pattern)) for pattern in ("iter_*", _OLD_FORMAT)
    )


def iteration_folder(folder: Path) -> Path:
    """The folder with the tensors; raises ``ConfigError`` for formats that cannot be read."""
    chosen = _newest(folder) if (folder / TRACKER).is_file() else folder
    remedy = "Let Megatron load it and save it with --ckpt-format torch_dist"
    if not chosen.is_dir():
        problem = f"its {TRACKER} names {chosen.name}, which is absent"
        raise ConfigError("SOURCE", str(folder), problem, "Copy the whole checkpoint")
    if any(chosen.glob(_OLD_FORMAT)):
        problem = "it is in Megatron's older format, a file for each rank"
        raise ConfigError("SOURCE", str(folder), problem, remedy)
    if not (chosen / METADATA).is_file():
        problem = f"{chosen} has no {METADATA}"
        raise ConfigError("SOURCE", str(folder), problem, "Give the folder of one checkpoint")
    backend = _backend(chosen / METADATA)
    if backend != FORMAT["sharded_backend"]:
        problem = f"its format is {backend!r}, and only torch_dist can be read"
        raise ConfigError("SOURCE", str(folder), problem, remedy)
    return chosen


def _newest(folder: Path) -> Path:
    path = folder / TRACKER
    try:
        name = path.read_text(encoding="utf-8").strip()
        return folder / (f"iter_{int(name):07}" if name.isdecimal() else name)
    except ValueError as error:  # no UTF-8, or a number of too many digits
        raise WorkError(f"{path} is damaged ({error}); copy it again") from error


def _backend(path: Path) -> object:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise WorkError(f"{path} is damaged ({error}); copy it again") from error
    return values.get("sharded_backend") if isinstance(values, dict) else None
