"""What the folder of a Hugging Face tokenizer says."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import ConfigError

_SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerFiles:
    """What a tokenizer's folder says, read once; plain values, so it can travel."""

    folder: str

    definition: str
    """Content of ``tokenizer.json``."""

    special_tokens: tuple[tuple[str, str], ...]
    """Names such as ``eos_token`` and the text of each, sorted."""

    chat_template: str | None
    """Jinja source."""

    @classmethod
    def read(cls, folder: Path, field: str) -> TokenizerFiles:
        """Read ``folder``; ConfigError on ``field`` if a file is missing or is not JSON."""
        definition = folder / "tokenizer.json"
        if not definition.is_file():
            raise ConfigError(
                field,
                str(folder),
                "the folder has no tokenizer.json",
                "Give 'bytes' or a folder with a tokenizer.json (transformers' save_pretrained "
                "of a fast tokenizer writes one)",
            )
        settings = _read_json(folder / "tokenizer_config.json", field)
        special = _read_json(folder / "special_tokens_map.json", field) | settings
        return cls(
            folder=str(folder),
            definition=_read_text(definition, field),
            special_tokens=tuple(
                (name, _text_of(name, special[name], folder, field))
                for name in sorted(_SPECIAL_NAMES)
                if special.get(name) is not None
            ),
            chat_template=_chat_template(folder, settings, field),
        )


def _read_json(path: Path, field: str) -> dict[str, Any]:
    """Content of an optional JSON object."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(_read_text(path, field))
    except ValueError as error:
        raise ConfigError(field, str(path), f"it is not JSON: {error}", "Mend the file") from error
    except RecursionError:
        raise ConfigError(field, str(path), "it is nested too deeply", "Mend the file") from None
    if not isinstance(content, dict):
        raise ConfigError(field, str(path), "it is not a JSON object", "Mend the file")
    return content


def _read_text(path: Path, field: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(field, str(path), f"it is not UTF-8: {error}", "Mend the file") from error


def _text_of(name: str, token: object, folder: Path, field: str) -> str:
    """Text of the special token ``name``, which the files hold as text or as an object."""
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        problem = f"its {name} is {token!r}, which is no text"
        raise ConfigError(field, str(folder), problem, "Mend tokenizer_config.json")
    return text


def _chat_template(folder: Path, settings: dict[str, Any], field: str) -> str | None:
    """The default template: a file of its own goes before ``tokenizer_config.json``."""
    own_file = folder / "chat_template.jinja"
    if own_file.is_file():
        return _read_text(own_file, field)
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry for entry in template if isinstance(entry, dict)}
        if "default" not in named:
            raise ConfigError(
                field,
                str(folder),
                f"none of its chat templates ({', '.join(sorted(map(str, named)))}) is called "
                "default",
                "Rename the one to use to default",
            )
        template = named["default"].get("template")
    if template is not None and not isinstance(template, str):
        problem = f"its chat template is {template!r}, which is no text"
        raise ConfigError(field, str(folder), problem, "Mend tokenizer_config.json")
    return template
