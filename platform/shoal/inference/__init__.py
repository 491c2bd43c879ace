"""Inference without Ray: requests, scheduling, KV blocks, sampling and text.

``scheduling`` decides who is computed, ``forward`` computes, ``sampler`` draws, ``text`` makes text
of tokens, ``engine`` has them do so step by step; ``journal`` keeps it, ``certify`` proves it.

What an ``Engine`` calls, in order, from a request to what it is answered:

    scheduler.add(request) -> sequences          per request; ConfigError = 400, Overloaded = 429
    choices[sequence] = Choice(sequence, texts)  per sequence
    step = scheduler.plan()                      chunks of tokens, with their blocks
    results = runner.run(step)                   rows, model, head, sampler: tokens and scores
    scheduler.complete(step, tokens)             or scheduler.fail(step)
    choices[sequence].advance(token) -> Output   per sequence that got a token, or ended: its text
    scheduler.finish(sequence)                   where its text met a stop string
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
