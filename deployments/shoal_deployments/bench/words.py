"""A tokenizer for models without one: byte-level BPE over made-up words.

Words have up to three letters, and each beginning of a word is a token: a text of such words is
merged pair by pair, as real text is, and has one token for each word.
"""

from __future__ import annotations

import itertools
import json
import random
import string
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

_START, _END = "<start>", "<end>"
_SPACE = "Ġ"


def write_words(folder: Path, vocab_size: int) -> None:
    """Write the tokenizer with ``vocab_size`` tokens, at least 258, into a model's folder."""
    singles = [_START, _END, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words = [
        _SPACE + "".join(letters)
        for length in (1, 2, 3)
        for letters in itertools.product(string.ascii_lowercase, repeat=length)
    ]
    words = words[: vocab_size - len(singles)]
    filler = [f"{_SPACE}#{number}" for number in range(vocab_size - len(singles) - len(words))]
    vocabulary = {token: number for number, token in enumerate([*singles, *words, *filler])}
    merges = [(word[:-1], word[-1]) for word in words]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([_START, _END])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": _START, "eos_token": _END}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def text_of(num_words: int) -> str:
    """A text of so many words of three letters."""
    draw = random.Random(0)
    words = ("".join(draw.choices(string.ascii_lowercase, k=3)) for _ in range(num_words))
    return "".join(f" {word}" for word in words)
