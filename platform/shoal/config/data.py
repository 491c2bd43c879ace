"""What the model is trained on."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from shoal.config.section import Section, in_vain, refuse


class SourceSettings(Section):
    """One entry of ``data.sources``."""

    path: str = Field(min_length=1)
    """File, folder (read recursively) or glob pattern; for ``megatron`` the common prefix of
    ``.bin`` and ``.idx``."""

    format: Literal["auto", "text", "jsonl", "parquet", "megatron"] = "auto"
    """How to read it; ``auto`` goes by the file's ending."""

    text_key: str = "text"
    """Column of JSONL and Parquet that holds the document's text."""

    messages_key: str = "messages"
    """Column of JSONL and Parquet that holds chat messages; where a row has it, only the
    assistant's words are labels."""

    include: tuple[str, ...] = ()
    """Patterns of file names to read, for example ``["*.py", "*.md"]``; a file that ``path`` names
    is filtered as well. Empty reads every file of a folder that fits ``format`` and is not hidden
    or binary."""

    weight: float | None = Field(default=None, gt=0)
    """This source's share of each epoch's sequences, relative to the other weights; either all
    sources have one or none has. Unset: every sequence of every source once per epoch."""

    @model_validator(mode="after")
    def _has_what_is_read(self) -> SourceSettings:
        found = []
        if self.format in ("text", "megatron"):
            problem = f"what is read as {self.format} has no columns"
            remedy = "Leave it out, or set the source's format to jsonl, parquet or auto"
            found += in_vain(self, ("text_key", "messages_key"), problem, remedy)
        if self.format == "megatron":
            problem = "a pair of .bin and .idx is named by its prefix, not by patterns"
            found += in_vain(self, ("include",), problem, "Leave it out")
        refuse(found)
        return self


class DataSettings(Section):
    """``data``: sources, tokenizer, sequence length and order."""

    sources: tuple[SourceSettings, ...] = Field(min_length=1)
    """Where documents come from."""

    tokenizer: str | None = Field(default=None, min_length=1)
    """``bytes`` or the folder of a Hugging Face tokenizer; unset takes that of the model's folder,
    or ``bytes`` if it has none."""

    seq_len: int = Field(default=512, ge=2)
    """Tokens per sequence."""

    shuffle: bool = True
    """Whether each epoch visits the sequences in a new order drawn from ``run.seed``."""

    epochs: int | None = Field(default=None, ge=1)
    """Passes over the data, after which the run ends even if steps remain; unset repeats the data
    until the last step."""

    workers: int = Field(default=1, ge=1)
    """Ray Data tasks that tokenize side by side."""
