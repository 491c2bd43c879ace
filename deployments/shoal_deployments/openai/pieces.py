"""Log-probabilities that go with the text: all pieces given so far joined are the text so far."""

from __future__ import annotations

from dataclasses import replace

from shoal.inference.protocol import Output, TokenLogprob


class Pieces:
    """The log-probabilities of one choice, held back as long as their text is.

    Text is held while a stop string is possible, and one that comes is left out; its tokens are
    listed all the same, with what little of their text is shown. A character that the end cuts
    short belongs to the last token.
    """

    def __init__(self) -> None:
        self._waiting: list[TokenLogprob] = []
        self._num_shown = 0

    def take(self, output: Output) -> tuple[TokenLogprob, ...]:
        """Add ``output`` and give the entries whose text has been shown with it."""
        self._waiting.extend(output.logprobs or ())
        self._num_shown += len(output.text)
        if output.finish_reason is None:
            whole = [entry for entry in self._waiting if _end(entry) <= self._num_shown]
            del self._waiting[: len(whole)]
            return tuple(whole)
        rest = [self._cut(entry) for entry in self._waiting]
        if rest and (num_missing := self._num_shown - _end(rest[-1])) > 0:
            rest[-1] = replace(rest[-1], text=rest[-1].text + output.text[-num_missing:])
        return tuple(rest)

    def _cut(self, entry: TokenLogprob) -> TokenLogprob:
        """``entry`` without the part of its text that is not shown."""
        if _end(entry) <= self._num_shown:
            return entry
        start = min(entry.offset, self._num_shown)
        return replace(entry, text=entry.text[: self._num_shown - start], offset=start)


def _end(entry: TokenLogprob) -> int:
    return entry.offset + len(entry.text)
