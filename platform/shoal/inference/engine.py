"""The serving engine: requests in, tokens and text out, one step at a time.

    owner (actor, command line, test)             engine
       │── add(request) ────────────────────────> │   queued, or refused by an exception
       │── step() ──────────────────────────────> │   plan, compute, sample, detokenize
       │ <──────────────────── list[Output] ──────│   what the step added to whom
       │── abort(id) ───────────────────────────> │   nothing more comes for it
       └── step() again while has_work

One thread calls all of it. A failure while a step is computed ends the sequences of that step with
the reason ``error``, a failure in one choice's text ends that choice; the engine goes on.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

from shoal.data import Tokenizer
from shoal.errors import ConfigError
from shoal.inference.choice import Choice
from shoal.inference.forward.model import ServedModel
from shoal.inference.forward.runner import Results, Runner
from shoal.inference.limits import Limits
from shoal.inference.protocol import Output, Stats
from shoal.inference.request import Request
from shoal.inference.sampler import Sampler
from shoal.inference.scheduling.scheduler import Scheduler
from shoal.inference.scheduling.sequence import FinishReason
from shoal.inference.scheduling.sequence import Sequence as Choiced
from shoal.inference.scheduling.step import Step
from shoal.inference.text.detokenizer import TokenTexts

logger = logging.getLogger(__name__)

_NO_NUMBERS = "the model's logits are no numbers"


class Engine:
    """Scheduler, model, sampler and text of one replica."""

    def __init__(
        self,
        model: ServedModel,
        limits: Limits,
        *,
        tokenizer: Tokenizer | None = None,
        end_ids: Sequence[int] = (),
    ) -> None:
        """``tokenizer`` makes text of tokens; unset, answers are token ids without text.

        ``end_ids`` are the model's end-of-text tokens.
        """
        self.model = model
        self.limits = limits
        self.scheduler = Scheduler(limits, end_ids)
        self._texts = None if tokenizer is None else TokenTexts(tokenizer)
        self._runner = Runner(
            model,
            Sampler(model.config.vocab_size, end_ids),
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
        )
        self._choices: dict[Choiced, Choice] = {}

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has something to compute."""
        return self.scheduler.has_work

    def stats(self) -> Stats:
        """Sizes and counters at this moment."""
        return self.scheduler.stats()

    def add(self, request: Request) -> bool:
        """Queue ``request``, unless its id was aborted before: then it is dropped, and False.

        Raises ConfigError for one that can never be served and Overloaded for one that finds the
        queue full.
        """
        if self._texts is None and request.params.stop:
            raise ConfigError(
                "stop", request.params.stop, "this model has no tokenizer", "Use stop_token_ids"
            )
        sequences = self.scheduler.add(request)
        if sequences[0].is_finished:
            return False
        for sequence in sequences:
            self._choices[sequence] = Choice(sequence, self._texts)
        return True

    def abort(self, request_id: str) -> int:
        """End what is left of a request at once, in any state; gives how many choices that were.

        Its blocks are free when this returns. Ids that are unknown are kept in mind.
        """
        ended = self.scheduler.abort(request_id)
        for sequence in ended:
            del self._choices[sequence]
        return len(ended)

    def step(self) -> list[Output]:
        """Compute the next step and give what it added, in the order of the sequences' places."""
        step = self.scheduler.plan()
        if not step.chunks:
            return []
        try:
            results = self._runner.run(step)
        # Whatever the kernels raise, others must not wait for ever: all of the step end as errors.
        except Exception as error:
            logger.exception(
                "step %d failed, and with it %d sequences", step.number, len(step.chunks)
            )
            return [
                self._choices.pop(sequence).failed(f"{type(error).__name__}: {error}")
                for sequence in self.scheduler.fail(step)
            ]
        return self._take(step, results)

    def _take(self, step: Step, results: Results) -> list[Output]:
        """Hand a step's results to scheduler and choices."""
        outputs = []
        for chunk, scored in zip(step.chunks, results.scored, strict=True):
            sequence = chunk.sequence
            if scored and sequence in self._choices:
                self._choices[sequence].prompt_scores += scored
                if any(math.isnan(each.logprob) for each in scored):
                    self.scheduler.finish(sequence, FinishReason.ERROR)
                    outputs.append(self._choices.pop(sequence).failed(_NO_NUMBERS))
        sampled = {
            chunk.sequence: result
            for chunk, result in zip(step.sampled, results.sampled, strict=True)
        }
        went_on = self.scheduler.complete(step, [result.token for result in results.sampled])
        for sequence in went_on:
            choice, result = self._choices[sequence], sampled.get(sequence)
            if sequence.finish_reason is FinishReason.ERROR:
                output = choice.failed(_NO_NUMBERS)
            else:
                output = self._guarded(choice, lambda: choice.advance(result))  # noqa: B023
            if output.finish_reason is not None:
                del self._choices[sequence]
                if not sequence.is_finished:
                    self.scheduler.finish(sequence, FinishReason(output.finish_reason))
            outputs.append(output)
        return outputs

    def _guarded(self, choice: Choice, advance: Callable[[], Output]) -> Output:
        """What ``advance`` gives, or the end of this one choice."""
        try:
            return advance()
        # The text of one request must not end the others, whatever is wrong with it.
        except Exception as error:
            logger.exception("the text of %r failed", choice.sequence)
            return choice.failed(f"{type(error).__name__}: {error}")
