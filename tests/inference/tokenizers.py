"""Tokenizers of the three kinds that matter for text that comes in pieces."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers

from shoal.data import Tokenizer as ShoalTokenizer
from shoal.data import load_tokenizer
from tests.data.tiny import write_tokenizer

SENTENCE_PIECES = ["▁Hello", "▁world", "▁", "a", "▁a", "ab", ",", "h", "é", "世", "\n", "▁▁"]
FIRST_BYTE = 3
"""Id of byte 0 in the sentencepiece tokenizer."""


def byte_level_bpe(folder: Path) -> ShoalTokenizer:
    """GPT-2's kind: any byte sequence, tokens may end inside a character."""
    return load_tokenizer(str(write_tokenizer(folder)))


def sentencepiece(folder: Path) -> ShoalTokenizer:
    """Llama 2's kind: pieces of text, single bytes for what has no piece, spaces as ▁."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *SENTENCE_PIECES]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={word: number for number, word in enumerate(words)},
            merges=[],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return load_tokenizer(str(folder))
