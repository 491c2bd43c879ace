"""From the name in the configuration to a tokenizer."""

from __future__ import annotations

from pathlib import Path

from shoal.data.tokenizer.byte_level import ByteTokenizer
from shoal.data.tokenizer.hugging_face import HFTokenizer
from shoal.data.tokenizer.interface import Tokenizer
from shoal.data.tokenizer.tokenizer_files import TokenizerFiles
from shoal.errors import ConfigError


def load_tokenizer(name: str, field: str = "data.tokenizer") -> Tokenizer:
    """Load ``bytes`` or the folder of a Hugging Face tokenizer.

    ConfigError on ``field`` if the folder is missing or holds no usable tokenizer.
    """
    if name == "bytes":
        return ByteTokenizer()
    folder = Path(name)
    if not folder.is_dir():
        raise ConfigError(
            field,
            name,
            "it is a file" if folder.exists() else "there is no such folder",
            "Give 'bytes' or the folder of a Hugging Face tokenizer",
        )
    return HFTokenizer(TokenizerFiles.read(folder, field), field)


def tokenizer_name(name: str | None, model_folder: str | None) -> str:
    """Which tokenizer a run uses: the one named, else the model folder's own, else ``bytes``."""
    if name is not None:
        return name
    if model_folder is not None and (Path(model_folder) / "tokenizer.json").is_file():
        return model_folder
    return "bytes"


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int, field: str = "data.tokenizer") -> None:
    """Refuse a tokenizer with ids that a model of ``vocab_size`` entries does not have."""
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            field,
            tokenizer.name,
            f"it has {tokenizer.vocab_size} tokens and the model's vocabulary only {vocab_size}",
            "Use the model's own tokenizer, or set the model's vocab_size to at least "
            f"{tokenizer.vocab_size}",
        )
