"""What the client of one choice has been told, and what it is told next."""

from __future__ import annotations

from shoal.inference.protocol import Output, TokenLogprob
from shoal.inference.sampler import Sampled, Scored
from shoal.inference.scheduling.sequence import FinishReason, Sequence
from shoal.inference.text.choice_text import ChoiceText, TextDelta
from shoal.inference.text.detokenizer import TokenTexts

_NO_TEXT = TextDelta(shown="", piece="", offset=0)


class Choice:
    """Turns the tokens of one sequence into its Outputs."""

    def __init__(self, sequence: Sequence, texts: TokenTexts | None) -> None:
        self.sequence = sequence
        self.prompt_scores: list[Scored] = []
        """Of the prompt's tokens from the second on, as they are computed."""
        self._texts = texts
        self._is_first = True
        self._text = None
        if texts is not None:
            params = sequence.request.params
            self._text = ChoiceText(texts, params.stop, min_tokens=params.min_tokens)

    def advance(self, sampled: Sampled | None) -> Output:
        """The output after the sequence got a token, or ended without one."""
        sequence = self.sequence
        shown, delta = "", _NO_TEXT
        stop = None
        tokens: tuple[int, ...] = ()
        if sampled is not None:
            assert sampled.token is not None
            tokens = (sampled.token,)
            if self._text is not None:
                delta = self._text.push(sampled.token, is_text=sequence.stop_token is None)
                shown, stop = delta.shown, delta.stop
        piece = delta.piece
        if self._text is not None and sequence.is_finished and stop is None:
            last = self._text.finish()
            shown, piece, stop = shown + last.shown, piece + last.piece, last.stop
        logprobs = None
        if sampled is not None and sampled.scored is not None:
            logprobs = (_logprob(sampled.scored, piece, delta.offset),)
        return self._output(tokens, shown, logprobs, stop)

    def failed(self, error: str) -> Output:
        """The last output of a choice that could not go on."""
        return Output(
            request_id=self.sequence.request.id,
            choice=self.sequence.index,
            finish_reason=str(FinishReason.ERROR),
            error=error,
        )

    def _output(
        self,
        tokens: tuple[int, ...],
        text: str,
        logprobs: tuple[TokenLogprob, ...] | None,
        stop: str | None,
    ) -> Output:
        sequence = self.sequence
        reason = sequence.finish_reason
        stop_reason: int | str | None = None
        if stop is not None:
            reason, stop_reason = FinishReason.STOP, stop
        elif sequence.stop_token in sequence.request.params.stop_token_ids:
            stop_reason = sequence.stop_token
        prompt_logprobs = self._prompt_logprobs() if self._is_first else None
        self._is_first = False
        return Output(
            request_id=sequence.request.id,
            choice=sequence.index,
            token_ids=tokens,
            text=text,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            finish_reason=None if reason is None else str(reason),
            stop_reason=stop_reason,
            num_cached_tokens=sequence.num_cached,
        )

    def _prompt_logprobs(self) -> tuple[TokenLogprob | None, ...] | None:
        request = self.sequence.request
        if request.params.prompt_logprobs is None or self.sequence.index != 0:
            return None
        pieces = _pieces(request.prompt, self._texts)
        logprobs: list[TokenLogprob | None] = [None]
        for scored, (piece, offset) in zip(self.prompt_scores, pieces[1:], strict=True):
            logprobs.append(_logprob(scored, piece, offset))
        return tuple(logprobs)


def _logprob(scored: Scored, piece: str, offset: int) -> TokenLogprob:
    return TokenLogprob(
        token=scored.token, logprob=scored.logprob, text=piece, offset=offset, top=scored.top
    )


def _pieces(tokens: tuple[int, ...], texts: TokenTexts | None) -> list[tuple[str, int]]:
    """What each of ``tokens`` adds to their text, and the characters before that."""
    if texts is None:
        return [("", 0)] * len(tokens)
    text = ChoiceText(texts)
    deltas = [text.push(token) for token in tokens]
    pieces = [(delta.piece, delta.offset) for delta in deltas]
    last, offset = pieces[-1]
    pieces[-1] = last + text.finish().piece, offset
    return pieces
