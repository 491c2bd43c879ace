"""The tokenizer of a GGUF file as the files of a Hugging Face tokenizer.

Two kinds exist in the Llama family: byte-level BPE, whose way of splitting text the file only
names, and SentencePiece BPE, whose merges the file holds as scores.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from shoal.errors import ConfigError, WorkError
from shoal.models.export import write_json
from shoal.models.gguf_file import GGUFFile

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPACE = "\u2581"  # SentencePiece's stand-in for a space
_CONTROL, _USER_DEFINED = 3, 4  # kinds of token in the file

_SPECIAL_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def write_tokenizer(file: GGUFFile, folder: Path, context: int) -> None:
    """Write ``tokenizer.json``, ``tokenizer_config.json`` and ``generation_config.json``.

    ``context`` is the model's longest sequence in tokens. Raises ``ConfigError`` for a kind of
    tokenizer that is not known.
    """
    tokens = file.value("tokenizer.ggml.tokens")
    if tokens is None:
        raise WorkError(f"{file.path} holds no tokenizer")
    kind = file.value("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = _byte_level(file, tokens)
    elif kind == "llama":
        tokenizer = _sentence_piece(file, tokens)
    else:
        raise _unknown(file, f"its tokenizer is of the kind {kind!r}")
    _add_tokens(tokenizer, file, tokens)
    _add_beginning(tokenizer, file, tokens, default=kind == "llama")
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", _settings(file, tokens, context))
    ids = {name: file.value(f"tokenizer.ggml.{key}") for name, key in _SPECIAL_TOKENS.items()}
    generation = {f"{name}_id": ids[name] for name in ("bos_token", "eos_token", "pad_token")}
    write_json(
        folder / "generation_config.json", {k: v for k, v in generation.items() if v is not None}
    )


def _byte_level(file: GGUFFile, tokens: list[str]) -> Tokenizer:
    split = file.value("tokenizer.ggml.pre", "gpt-2")
    whole_words = False
    pre_tokenizer: Any
    if split in ("gpt-2", "default"):
        pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif split == "smollm":
        pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    elif split in ("llama-bpe", "llama3", "llama-v3"):
        whole_words = True
        pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    else:
        raise _unknown(file, f"it splits text the way {split!r} does")
    merges = [tuple(merge.split(" ")) for merge in file.value("tokenizer.ggml.merges", [])]
    model = models.BPE(vocab=_vocabulary(tokens), merges=merges, ignore_merges=whole_words)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(file: GGUFFile, tokens: list[str]) -> Tokenizer:
    vocabulary = _vocabulary(tokens)
    scores = file.value("tokenizer.ggml.scores")
    if scores is None:
        raise WorkError(f"{file.path} holds a SentencePiece tokenizer without scores")
    unknown = tokens[file.value("tokenizer.ggml.unknown_token_id", 0)]
    model = models.BPE(
        vocab=vocabulary,
        merges=_merges_of_scores(vocabulary, scores),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    leading = file.value("tokenizer.ggml.add_space_prefix", True)
    replace = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_SPACE), replace]) if leading else replace
    )
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if leading:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges_of_scores(vocabulary: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every pair of tokens that makes a token, the highest score of the whole first."""
    merges = [
        (-scores[number], vocabulary[token[:cut]], vocabulary[token[cut:]], token, cut)
        for token, number in vocabulary.items()
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    return [(token[:cut], token[cut:]) for *_, token, cut in sorted(merges)]


def _vocabulary(tokens: list[str]) -> dict[str, int]:
    return {token: number for number, token in enumerate(tokens)}


def _add_tokens(tokenizer: Tokenizer, file: GGUFFile, tokens: list[str]) -> None:
    kinds = file.value("tokenizer.ggml.token_type", [])
    of_kind = {
        wanted: [t for t, kind in zip(tokens, kinds, strict=False) if kind == wanted]
        for wanted in (_CONTROL, _USER_DEFINED)
    }
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in of_kind[_CONTROL]]
    )
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in of_kind[_USER_DEFINED]])


def _add_beginning(
    tokenizer: Tokenizer, file: GGUFFile, tokens: list[str], *, default: bool
) -> None:
    """Have every text start with the beginning-of-text token where the file asks for it."""
    number = file.value("tokenizer.ggml.bos_token_id")
    if number is None or not file.value("tokenizer.ggml.add_bos_token", default):
        return
    token = tokens[number]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A {token} $B:1", special_tokens=[(token, number)]
    )


def _settings(file: GGUFFile, tokens: list[str], context: int) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }
    for name, key in _SPECIAL_TOKENS.items():
        number = file.value(f"tokenizer.ggml.{key}")
        if number is not None:
            settings[name] = tokens[number]
    template = file.value("tokenizer.chat_template")
    if template is not None:
        settings["chat_template"] = template
    return settings


def _unknown(file: GGUFFile, problem: str) -> ConfigError:
    return ConfigError(
        "SOURCE",
        str(file.path),
        problem,
        "Give the Hugging Face folder of this model instead",
    )
