"""Write Megatron's ``.bin`` and ``.idx`` pair with Megatron's own builder.

The only module that imports Megatron. Beside the tokens a second pair, ``PREFIX_mask``, holds one
byte a token that is 1 where the token may be a label; it exists only if some document masks words.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from shoal.data.indexed_tokens import mask_prefix


def megatron_indexed_dataset() -> ModuleType:
    """Megatron's indexed datasets; imported late because it takes seconds, which readers save."""
    with warnings.catch_warnings():
        # Megatron's package imports all of its training code, which announces what it lacks.
        for category, message in (
            (DeprecationWarning, r"`torch\.jit\.script"),
            (DeprecationWarning, r"The following imports from `dynamic_context\.py`"),
            (UserWarning, r"Transformer Engine and Apex are not installed"),
        ):
            warnings.filterwarnings("ignore", message=message, category=category)
        from megatron.core.datasets import indexed_dataset
    logging.getLogger("megatron").setLevel(logging.WARNING)  # it tells of every file it opens
    module: ModuleType = indexed_dataset
    return module


class IndexedWriter:
    """Documents into the pair ``prefix``, whole once the ``with`` block has ended without error.

    ``vocab_size`` decides the token type: uint16 below 65,500 entries, else int32.
    """

    def __init__(self, prefix: Path, vocab_size: int) -> None:
        self._megatron = megatron_indexed_dataset()
        self._prefix = prefix
        self._tokens = self._builder(prefix, self._megatron.DType.optimal_dtype(vocab_size))
        self._mask: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        builders = [(self._tokens, self._prefix), (self._mask, mask_prefix(self._prefix))]
        for builder, prefix in builders:
            if builder is not None and kind is None:
                builder.finalize(f"{prefix}.idx")
            elif builder is not None:
                builder.data_file.close()

    def add(self, tokens: Sequence[int], is_label: Sequence[bool] | None = None) -> None:
        """Append one document; without ``is_label`` every token may be a label."""
        if is_label is not None:
            self._need_mask()
        self._tokens.add_document(np.asarray(tokens), [len(tokens)])
        if self._mask is not None:
            mask = np.ones(len(tokens)) if is_label is None else np.asarray(is_label)
            self._mask.add_document(mask, [len(tokens)])

    def append(self, prefix: Path) -> None:
        """Append every document of another pair of the same token type."""
        has_mask = Path(f"{mask_prefix(prefix)}.idx").exists()
        if has_mask:
            self._need_mask()
        before = len(self._tokens.sequence_lengths)
        self._tokens.add_index(str(prefix))
        if has_mask:
            self._mask.add_index(str(mask_prefix(prefix)))
        elif self._mask is not None:
            self._add_unmasked(self._tokens.sequence_lengths[before:])

    def _need_mask(self) -> None:
        """Start the mask pair, with the documents so far, unless it exists."""
        if self._mask is None:
            self._mask = self._builder(mask_prefix(self._prefix), np.uint8)
            self._add_unmasked(self._tokens.sequence_lengths)

    def _add_unmasked(self, lengths: Iterable[int]) -> None:
        for length in lengths:
            self._mask.add_document(np.ones(length), [length])

    def _builder(self, prefix: Path, dtype: npt.DTypeLike) -> Any:
        return self._megatron.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
