"""One choice of a request on its way through the engine."""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum

from shoal.inference.request import Request


class State(StrEnum):
    """Where a sequence stands.

        WAITING ──admit──> PREFILLING ──advance──> DECODING
           ^                   │ │                   │ │
           └─────preempt───────┘ │     preempt ──────┘ │
           (all four) ──────── finish ──────────> FINISHED

    Only the methods of ``Sequence`` change it.
    """

    WAITING = "waiting"
    """In the queue, without blocks."""
    PREFILLING = "prefilling"
    """Holds blocks for all known tokens; some of them are still to be computed."""
    DECODING = "decoding"
    """All known tokens but the last are computed: each step gives one more."""
    FINISHED = "finished"


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    """End-of-text, a stop token or a stop string."""
    LENGTH = "length"
    """``max_tokens``, or the end of the context."""
    ABORT = "abort"
    """Nobody waits for it any more."""
    ERROR = "error"
    """The step that computed it failed."""


class Sequence:
    """Tokens, blocks and state of one choice.

    ``max_tokens`` is what the request may have after ``Limits.check``; ``place`` decides about the
    order (see ``InOrder``).
    """

    def __init__(
        self, request: Request, index: int, max_tokens: int, place: tuple[int, int, int]
    ) -> None:
        self.request = request
        self.index = index
        self.max_tokens = max_tokens
        self.place = place
        self.tokens: list[int] = list(request.prompt)
        """Prompt and what was generated."""
        self.state = State.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_token: int | None = None
        """The token that ended it, if one did."""
        self.blocks: list[int] = []
        """Blocks of the KV pool in the order of the tokens."""
        self.twins: dict[int, int] = {}
        """Index in ``blocks`` to the block of the same content that takes its place after the
        step."""
        self.hashes: list[bytes] = []
        """Chained hashes of the full blocks of ``tokens``, as far as they were needed."""
        self.num_computed = 0
        """Tokens whose keys and values are in ``blocks``."""
        self.num_scored = 0
        """Rows of the prompt whose log-probabilities were handed out."""
        self.num_cached = 0
        """Tokens of the prompt that the first admission found in the prefix cache."""
        self.num_preemptions = 0

    def __repr__(self) -> str:
        return f"<{self.request.id}/{self.index} {self.state} {len(self.tokens)}>"

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt)

    @property
    def num_generated(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def generated(self) -> list[int]:
        """A copy of the tokens generated so far."""
        return self.tokens[self.num_prompt :]

    @property
    def num_missing(self) -> int:
        """Known tokens that are still to be computed."""
        return len(self.tokens) - self.num_computed

    @property
    def is_scoring(self) -> bool:
        """Whether log-probabilities of the prompt are still to be computed; choice 0 does it."""
        return (
            self.index == 0
            and self.request.params.prompt_logprobs is not None
            and self.num_scored < self.num_prompt - 1
        )

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will come."""
        return self.state is State.FINISHED

    def admit(self, blocks: list[int], num_cached: int) -> None:
        """Leave the queue with ``blocks``, the first ``num_cached`` tokens already computed."""
        assert self.state is State.WAITING
        if self.num_preemptions == 0:
            self.num_cached = num_cached
        self.blocks = blocks
        self.num_computed = num_cached
        self.state = State.PREFILLING

    def advance(self, count: int) -> None:
        """Take note that the next ``count`` known tokens were computed."""
        assert self.state in (State.PREFILLING, State.DECODING) and count <= self.num_missing
        self.num_computed += count
        if self.num_missing == 0:
            self.state = State.DECODING

    def append(self, token: int, end_ids: Collection[int]) -> None:
        """Add the sampled ``token``, which may be the last: one of ``end_ids`` is end-of-text."""
        assert self.state is State.DECODING and self.num_missing == 0
        self.tokens.append(token)
        params = self.request.params
        ends = token in params.stop_token_ids or (token in end_ids and not params.ignore_eos)
        if ends and self.num_generated > params.min_tokens:
            self.stop_token = token
            self.finish(FinishReason.STOP)
        elif self.num_generated >= self.max_tokens:
            self.finish(FinishReason.LENGTH)

    def preempt(self) -> None:
        """Go back to the queue, the blocks released; what they held is lost, the tokens are not."""
        assert self.state in (State.PREFILLING, State.DECODING) and not self.blocks
        self.num_computed = 0
        self.num_preemptions += 1
        self.state = State.WAITING

    def finish(self, reason: FinishReason) -> None:
        """End."""
        assert self.state is not State.FINISHED
        self.finish_reason = reason
        self.state = State.FINISHED
