"""Inference without Ray: requests, scheduling, KV blocks, sampling and text.

``scheduling`` decides who is computed, ``forward`` computes, ``sampler`` draws, ``text`` makes text
of tokens, ``engine`` has them do so step by step; ``journal`` keeps it, ``certify`` proves it.

Who calls what, in order, for one step of an engine (``sampler`` is ``sampler.Sampler``):

    texts_of_ids = TokenTexts(tokenizer)         once
    scheduler.add(request) -> sequences          per request; ConfigError = 400, Overloaded = 429
    texts[sequence] = ChoiceText(...)            per sequence
    step = scheduler.plan()                      chunks of tokens, with their blocks
    logits = model(step)                         fp32 [rows, V]: chunk.scored and chunk.samples
    sampled = sampler.sample(logits, rows)       one Row per chunk of step.sampled
    scheduler.complete(step, tokens)             or scheduler.fail(step)
    texts[sequence].push(token) -> TextDelta     per sequence that got a token
    scheduler.finish(sequence)                   where the delta says that a stop string was met
    texts[sequence].finish() -> TextDelta        per sequence that ended otherwise
    Output(...)                                  what the step added, to whoever asked
"""

from shoal.inference.limits import Limits
from shoal.inference.params import SamplingParams
from shoal.inference.protocol import Output, Stats, Submission, TokenLogprob
from shoal.inference.request import Request
from shoal.inference.scheduling import (
    ROOT_HASH,
    BlockPool,
    Chunk,
    FinishReason,
    Scheduler,
    Sequence,
    State,
    Step,
    block_hashes,
    child_hash,
)
from shoal.inference.step_engine import StepEngine
from shoal.inference.text import ChoiceText, Detokenizer, StopStrings, TextDelta, TokenTexts

__all__ = [
    "BlockPool",
    "ChoiceText",
    "Chunk",
    "Detokenizer",
    "FinishReason",
    "Limits",
    "Output",
    "ROOT_HASH",
    "Request",
    "SamplingParams",
    "Scheduler",
    "Sequence",
    "State",
    "Stats",
    "Step",
    "StepEngine",
    "StopStrings",
    "Submission",
    "TextDelta",
    "TokenLogprob",
    "TokenTexts",
    "block_hashes",
    "child_hash",
]
