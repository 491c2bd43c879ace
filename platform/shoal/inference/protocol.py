"""What crosses processes between a frontend and an engine: frozen plain values.

    frontend                                engine
       │── Submission ──────────────────────> │   one for each prompt
       │ <──── list[Output], one per step ────│   for all requests of this frontend together
       │── ids to abort ────────────────────> │   a client left; may overtake its Submission
       │ <──────────────── Stats ─────────────│

Every choice of a request ends with exactly one Output that has a ``finish_reason``, unless the
request was aborted, after which nothing more comes.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.inference.request import Request


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """A request on its way to an engine."""

    request: Request

    frontend: str = ""
    """Who gets its outputs."""

    moved_from: int | None = None
    """Place of the engine that was lost while it computed this; unset: it is new."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprob:
    """One token of an answer or a prompt, its log-probability and its place in the text."""

    token: int

    logprob: float
    """Of the model's own distribution: before penalties, bias, temperature and filters."""

    text: str
    """What this token added to the text: all pieces joined are the text. Empty for a token that
    ends inside a character; the token that completes the character has it."""

    offset: int
    """Characters of the text, of the prompt's or of the answer's, before ``text``."""

    top: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability) of the likeliest, falling, the lower id first among equals."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """What one step added to one choice."""

    request_id: str

    choice: int
    """Index of the choice, below the request's ``n``."""

    token_ids: tuple[int, ...] = ()
    """New tokens; the one that ended the answer is among them."""

    text: str = ""
    """New text, safe to show: no part of a stop string, no half character. All texts of a choice
    joined are its answer."""

    logprobs: tuple[TokenLogprob, ...] | None = None
    """One for each of ``token_ids`` where the request asked for them."""

    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """One for each token of the prompt, None for the first; comes once, with choice 0."""

    finish_reason: str | None = None
    """``stop``, ``length`` or ``error`` with the last output of the choice."""

    stop_reason: int | str | None = None
    """The stop token or stop string that ended the answer; unset for end-of-text."""

    num_cached_tokens: int = 0
    """Tokens of the prompt that were found in the prefix cache."""

    error: str | None = None
    """What failed, for the reason ``error``."""

    durable: bool | None = None
    """With the last output of a choice of a durable request: whether its tokens are on the disk of
    the engine's journal."""

    durable_problem: str | None = None
    """Why they are not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stats:
    """An engine at a moment; counters count from its start."""

    running: int
    """Sequences that hold blocks."""

    max_running: int
    """How many may at a time."""

    waiting: int
    """Sequences in the queue."""

    kv_blocks_total: int

    kv_blocks_free: int
    """Blocks that no sequence holds, cached ones included: they are given away when needed."""

    kv_blocks_cached: int
    """Of the free blocks those that still hold a prefix somebody may ask for again."""

    finished: int
    """Sequences that ended by themselves."""

    cancelled: int
    """Sequences that were aborted."""

    failed: int
    """Sequences whose step failed."""

    refused: int
    """Requests turned away, as wrong or for want of room in the queue."""

    preempted: int
    """How many times a sequence had to give up its blocks."""

    prefix_hit_tokens: int
    """Tokens found in the prefix cache rather than computed."""

    computed_tokens: int
    """Tokens that went through the model."""

    generated_tokens: int

    steps: int
