"""The text of one choice: detokenized, watched for stop strings, piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.inference.text.detokenizer import Detokenizer, TokenTexts
from shoal.inference.text.stop_strings import StopStrings


@dataclass(frozen=True, kw_only=True, slots=True)
class TextDelta:
    """What one token, or the end, added to a text."""

    shown: str
    """Text to send now; may lag behind ``piece`` while a stop string is possible."""

    piece: str
    """What the token added to the text before stop strings were looked for."""

    offset: int
    """Characters of the text before ``piece``."""

    stop: str | None = None
    """The stop string that ended the text."""


class ChoiceText:
    """``push`` each token, then ``finish`` unless a delta had a ``stop``.

    All ``shown`` joined are the answer, streamed or not; all ``piece`` joined are the text of all
    tokens. Stop strings count once ``min_tokens`` tokens have come: text from before then is not
    looked at.
    """

    def __init__(
        self, texts: TokenTexts, stops: Sequence[str] = (), *, min_tokens: int = 0
    ) -> None:
        self._detokenizer = Detokenizer(texts)
        self._stops = StopStrings(stops)
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._num_characters = 0

    def push(self, token: int, *, is_text: bool = True) -> TextDelta:
        """Add ``token``; ``is_text=False`` for one that ended the answer and is not shown."""
        self._num_tokens += 1
        return self._add(self._detokenizer.push(token) if is_text else "")

    def finish(self) -> TextDelta:
        """End the text: what was held back is shown, unless it holds a stop string after all."""
        last = self._add(self._detokenizer.finish())
        if last.stop is not None:
            return last
        shown = last.shown + self._stops.finish()
        return TextDelta(shown=shown, piece=last.piece, offset=last.offset)

    def _add(self, piece: str) -> TextDelta:
        offset = self._num_characters
        self._num_characters += len(piece)
        if self._num_tokens <= self._min_tokens:
            return TextDelta(shown=piece, piece=piece, offset=offset)
        shown = self._stops.push(piece)
        return TextDelta(shown=shown, piece=piece, offset=offset, stop=self._stops.matched)
