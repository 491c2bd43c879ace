"""A Hugging Face tokenizer from its folder, without ``transformers``."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import tokenizers

from shoal.data.tokenizer.chat_template import ChatTemplate, RenderedChat
from shoal.data.tokenizer.interface import ChatTokens, Message, well_formed
from shoal.data.tokenizer.tokenizer_files import TokenizerFiles
from shoal.data.tokenizer.vocabulary_bytes import VocabularyBytes
from shoal.errors import ConfigError


class HFTokenizer:
    """``tokenizer.json`` run by the ``tokenizers`` library.

    Special tokens spelled out in a text become those tokens, as in ``transformers``; so a corpus
    already rendered by a chat template works. Padding and truncation that the file may ask for are
    switched off: a document is never cut. ConfigError on ``field`` if the definition cannot be
    loaded or names no known end-of-text (``eos_token``).
    """

    def __init__(self, files: TokenizerFiles, field: str = "data.tokenizer") -> None:
        self._files = files
        self._field = field
        self._encoder = self._load(files.definition)
        self._special_tokens = dict(files.special_tokens)
        self.name = files.folder
        self.vocab_size = self._find_vocab_size()
        self.end_of_text = self._find_end_of_text()
        self._special_ids = {
            token
            for token, added in self._encoder.get_added_tokens_decoder().items()
            if added.special
        }
        self._bytes = VocabularyBytes(self._encoder)
        self._template = (
            None
            if files.chat_template is None
            else ChatTemplate(files.chat_template, self._special_tokens)
        )

    def __reduce__(self) -> tuple[type[HFTokenizer], tuple[TokenizerFiles, str]]:
        return type(self), (self._files, self._field)  # a compiled template does not pickle

    @property
    def fingerprint(self) -> str:
        """Hash of every file that decides about tokens."""
        files = self._files
        decisive = (files.definition, files.special_tokens, files.chat_template)
        return hashlib.sha256(repr(decisive).encode("utf-8", "surrogatepass")).hexdigest()

    @property
    def has_chat_template(self) -> bool:
        """Whether the folder has one."""
        return self._template is not None

    def encode(self, text: str) -> list[int]:
        """Ids of ``text`` alone, no start token and no end-of-text added."""
        return self._encode(text, add_special_tokens=False)

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of ``text`` with what ``tokenizer.json`` itself puts around a text."""
        return self._encode(text, add_special_tokens=True)

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of ``tokens``, special tokens left out."""
        [text] = self._encoder.decode_batch([list(tokens)], skip_special_tokens=True)
        return str(text)

    def token_bytes(self, token: int) -> bytes | None:
        """Bytes of ``token`` where the vocabulary says them."""
        entry = None if token in self._special_ids else self._encoder.id_to_token(token)
        return None if entry is None else self._bytes.of(entry)

    def special_text(self, token: int) -> str | None:
        """What a text spells a special token as."""
        return str(self._encoder.id_to_token(token)) if token in self._special_ids else None

    def encode_document(self, text: str) -> list[int]:
        """Ids of one whole document, with what ``tokenizer.json`` itself puts around a text."""
        tokens = self.encode_prompt(text)
        return tokens if tokens[-1:] == [self.end_of_text] else [*tokens, self.end_of_text]

    def encode_chat(self, messages: Sequence[Message]) -> ChatTokens:
        """One whole chat; a token that overlaps the assistant's words is a label.

        Where the template ends without end-of-text it is appended, and is a label if the token
        before it is one: a chat whose template has no end marker still teaches the model to stop.
        """
        rendered = self._chat_template.render_with_spans(messages)
        encoding = self._encoder.encode(rendered.text, add_special_tokens=False)
        tokens: list[int] = list(encoding.ids)
        spans = rendered.spans
        if not rendered.is_marked:
            spans = tuple(
                (start, self._end_of_turn(rendered, start, end, tokens, encoding.offsets))
                for start, end in spans
            )
        is_label = _overlap(encoding.offsets, spans)
        if tokens[-1:] != [self.end_of_text]:
            tokens.append(self.end_of_text)
            is_label.append(bool(is_label) and is_label[-1])
        return ChatTokens(tokens=tokens, is_label=is_label)

    def apply_chat_template(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a chat up to where the assistant speaks next."""
        return self.encode(self._chat_template.render(messages, add_generation_prompt=True))

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # A batch of one, because only batches let other threads run meanwhile.
        batch = [well_formed(text)]
        [encoding] = self._encoder.encode_batch_fast(batch, add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    @property
    def _chat_template(self) -> ChatTemplate:
        if self._template is None:
            raise ConfigError(
                self._field,
                self.name,
                "there are chats to tokenize, and it has no chat template",
                "Add chat_template.jinja to its folder, or give text instead of messages",
            )
        return self._template

    def _load(self, definition: str) -> tokenizers.Tokenizer:
        try:
            encoder = tokenizers.Tokenizer.from_str(definition)
        except Exception as error:  # the library raises Exception itself, nothing narrower
            raise ConfigError(
                self._field,
                self._files.folder,
                f"its tokenizer.json cannot be loaded: {error}",
                "Download or export the tokenizer again",
            ) from error
        encoder.no_padding()
        encoder.no_truncation()
        return encoder

    def _find_vocab_size(self) -> int:
        ids = self._encoder.get_vocab().values()
        if not ids:
            raise ConfigError(
                self._field,
                self._files.folder,
                "its tokenizer.json has no tokens",
                "Download or export the tokenizer again",
            )
        return max(ids) + 1

    def _find_end_of_text(self) -> int:
        text = self._special_tokens.get("eos_token")
        token = None if text is None else self._encoder.token_to_id(text)
        if token is None:
            raise ConfigError(
                self._field,
                self._files.folder,
                f"its eos_token is {text!r}, which tokenizer.json does not know",
                "Set eos_token in tokenizer_config.json",
            )
        return int(token)

    def _end_of_turn(
        self,
        rendered: RenderedChat,
        start: int,
        end: int,
        tokens: list[int],
        offsets: list[tuple[int, int]],
    ) -> int:
        """End of a turn without the white space after its end marker, which nobody generates."""
        marker_ends = [
            last
            for token, (first, last) in zip(tokens, offsets, strict=True)
            if token in self._special_ids and start <= first and last <= end
        ]
        if marker_ends and rendered.text[marker_ends[-1] : end].isspace():
            return marker_ends[-1]
        return end


def _overlap(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> list[bool]:
    """Whether each token's characters overlap one of ``spans``; both are in order."""
    flags = []
    position = 0
    for first, last in offsets:
        while position < len(spans) and first >= spans[position][1]:
            position += 1
        flags.append(position < len(spans) and last > spans[position][0])
    return flags
