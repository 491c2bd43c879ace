"""A tiny byte-level BPE tokenizer in a folder as ``transformers`` writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

SPECIAL_TOKENS = ["<|start|>", "<|end|>", "<|im_start|>", "<|im_end|>"]

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

MARKED_CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>' + '\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Say héllo to 世界, please"},
    {"role": "assistant", "content": "Héllo 世界 👋"},
    {"role": "user", "content": "  again\n"},
    {"role": "assistant", "content": "Hello\n\nagain"},
]

_CORPUS = ["Say hello to the world, please. Be brief.", "again and again the assistant says hello"]


def write_tokenizer(
    folder: Path,
    *,
    chat_template: str | list[dict[str, str]] | None = CHATML,
    post_processor_adds_start: bool = False,
    cuts_and_pads: bool = False,
    **settings: Any,
) -> Path:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``; ``settings`` go into the latter."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    if post_processor_adds_start:
        tokenizer.post_processor = TemplateProcessing(
            single="<|start|> $A", special_tokens=[("<|start|>", 0)]
        )
    if cuts_and_pads:
        tokenizer.enable_truncation(4)
        tokenizer.enable_padding(length=8)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|start|>",
        "eos_token": {"content": "<|im_end|>", "__type": "AddedToken"},
        **settings,
    }
    if chat_template is not None:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def oracle(folder: Path) -> Any:
    """The tokenizer of ``folder`` as ``transformers`` loads it."""
    return AutoTokenizer.from_pretrained(folder)
