"""Tokens to text, one token at a time, without ever splitting a character."""

from __future__ import annotations

from collections.abc import Iterable

from shoal.data import Tokenizer

_REPLACEMENT = "\ufffd"
_LONGEST_CHARACTER = 4
"""Bytes of UTF-8."""


class TokenTexts:
    """The text of token ids, each after other text, so that no leading space is lost.

    Sentencepiece tokenizers strip the space before the first word that they decode; so everything
    is decoded behind an anchor, a token of plain text, whose text is then cut off. Ids that only
    the model has, as its vocabulary may be padded, have no text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._anchor = tokenizer.encode("a")[-1:]
        self._num_anchor = len(tokenizer.decode(self._anchor))
        self._single: dict[int, str] = {}

    def one(self, token: int) -> str:
        """Text of ``token`` alone; U+FFFD for bytes that are no whole character."""
        text = self._single.get(token)
        if text is None:
            text = self._single[token] = self.many([token])
        return text

    def many(self, tokens: list[int]) -> str:
        """Text of ``tokens``."""
        return self._tokenizer.decode([*self._anchor, *self._known(tokens)])[self._num_anchor :]

    def whole(self, tokens: Iterable[int]) -> str:
        """Text of ``tokens`` with nothing before them."""
        return self._tokenizer.decode(self._known(tokens))

    def _known(self, tokens: Iterable[int]) -> list[int]:
        return [token for token in tokens if token < self._tokenizer.vocab_size]


class Detokenizer:
    """The text of one growing list of tokens, in deltas that joined are its whole text.

    What could still become a character is held back: at most the last three bytes. Bytes that can
    become none, and what is held back when the tokens end, are U+FFFD, as in ``decode``. (In a
    sentencepiece tokenizer's run of byte tokens ``decode`` gives up all characters of the run for
    one damaged byte, be it the last; here those that were complete before it stay.)
    """

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._pending: list[int] = []
        self._num_shown = 0  # characters of the pending tokens' text that were given already

    def push(self, token: int) -> str:
        """Give the text that is certain now that ``token`` has come."""
        if not self._pending:
            text = self._texts.one(token)
            if not text.endswith(_REPLACEMENT):
                return text
        self._pending.append(token)
        return self._certain()

    def finish(self) -> str:
        """Give what was held back; the next token starts a new text."""
        tail = self._texts.many(self._pending)[self._num_shown :]
        self._pending = []
        self._num_shown = 0
        return tail

    def _certain(self) -> str:
        """Text of the pending tokens that no later one can change, as far as it is new."""
        text = self._texts.many(self._pending)
        solid = text.rstrip(_REPLACEMENT)
        if len(solid) == len(text):
            delta = text[self._num_shown :]
            self._pending = []
            self._num_shown = 0
            return delta
        # An unfinished character is one U+FFFD, or in sentencepiece one for each of its bytes.
        certain = max(len(solid), len(text) - (_LONGEST_CHARACTER - 1), self._num_shown)
        delta = text[self._num_shown : certain]
        self._num_shown = certain
        self._drop_shown(text)
        return delta

    def _drop_shown(self, text: str) -> None:
        """Forget pending tokens from the front whose text was given and stands by itself."""
        while len(self._pending) >= _LONGEST_CHARACTER:
            first = self._texts.one(self._pending[0])
            rest = self._texts.many(self._pending[1:])
            if len(first) > self._num_shown or first + rest != text:
                return
            del self._pending[0]
            self._num_shown -= len(first)
            text = rest
