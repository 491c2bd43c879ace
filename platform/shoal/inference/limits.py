"""What one engine can take, and which requests it therefore refuses at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shoal.errors import ConfigError
from shoal.inference.request import Request


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Sizes of an engine, checked together: ConfigError on one of these fields.

    ``loading.limits_of`` makes them of what the user wrote, and refuses that by its own names.
    """

    vocab_size: int
    """Rows of the model's head; every token id of a request lies below it."""

    context_length: int
    """Most tokens of prompt and answer together."""

    num_blocks: int
    """Blocks of the KV pool."""

    block_size: int = 64
    """Tokens of a block."""

    prefix_cache: bool = True
    """Whether blocks that nobody holds any more are kept for requests that begin alike; those that
    run at the same time share blocks in any case."""

    max_running: int = 64
    """Sequences that hold blocks at a time."""

    max_step_tokens: int = 512
    """Tokens computed in a step; longer prompts are computed in chunks."""

    max_waiting: int = 1024
    """Sequences in the queue; a request that finds no room there is turned away (429 or 503)."""

    priority_arrivals: int = 1024
    """How many later requests one level of priority lets a request overtake."""

    max_choices: int = 128
    """Most ``n``."""

    max_logprobs: int = 20
    """Most ``logprobs`` and ``prompt_logprobs``."""

    max_stops: int = 16
    """Most ``stop`` texts, and most ``stop_token_ids``."""

    max_stop_length: int = 1024
    """Most characters of a ``stop`` text."""

    max_logit_biases: int = 1024
    """Most entries of ``logit_bias``."""

    max_remembered_aborts: int = 10_000
    """Ids aborted before their request came that are kept in mind."""

    def __post_init__(self) -> None:
        for field in self.__dataclass_fields__:
            if field != "prefix_cache" and getattr(self, field) < 1:
                raise ConfigError(field, getattr(self, field), "it is below 1", "Raise it")
        if self.max_step_tokens < self.max_running:
            raise ConfigError(
                "max_step_tokens",
                self.max_step_tokens,
                f"a step has to hold one token of each of max_running = {self.max_running} "
                "sequences",
                f"Raise it to at least {self.max_running}, or lower max_running",
            )

    @property
    def pool_tokens(self) -> int:
        """Tokens whose keys and values the KV pool holds."""
        return self.num_blocks * self.block_size

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold the keys and values of ``num_tokens``."""
        return -(-num_tokens // self.block_size)

    def longest_prompt(self, max_tokens: int | None) -> int:
        """Most tokens of a prompt after which one of the answer has room, unless none is wanted."""
        return min(self.pool_tokens, self.context_length - (0 if max_tokens == 0 else 1))

    def check(self, request: Request) -> int:
        """Give the most tokens that ``request`` may generate, or refuse it with a ConfigError.

        Refused are a prompt that leaves no room for one token in the context or in the KV pool,
        and a ``max_tokens`` with which the request could not be finished even alone in the pool.
        One beyond the context is cut: the answer then ends there, for the reason ``length``. So
        whatever is accepted fits into the pool by itself, and none waits for what cannot come.
        """
        self._check_ids(request)
        self._check_counts(request)
        num_prompt = len(request.prompt)
        wanted = request.params.max_tokens
        by_context = self.context_length - num_prompt
        # The last token that is generated is never computed, so it takes no room in the pool.
        by_pool = self.pool_tokens + 1 - num_prompt
        longest = self.longest_prompt(wanted)
        if num_prompt > longest:
            room, size = (
                ("KV pool", self.pool_tokens)
                if self.pool_tokens < self.context_length
                else ("context", self.context_length)
            )
            raise ConfigError(
                "prompt",
                f"{num_prompt} tokens",
                f"it leaves no room for an answer in the {room} of {size} tokens",
                f"Shorten it to at most {longest} tokens",
            )
        if wanted is None:
            return min(by_context, by_pool)
        if min(wanted, by_context) > by_pool:
            raise ConfigError(
                "max_tokens",
                wanted,
                f"with the prompt of {num_prompt} tokens the answer could outgrow the KV pool of "
                f"{self.pool_tokens} tokens",
                f"Lower it to at most {by_pool}",
            )
        return min(wanted, by_context)

    def _check_ids(self, request: Request) -> None:
        if not request.prompt:
            raise ConfigError("prompt", "", "it has no tokens", "Give at least one")
        self._check_vocabulary("prompt", request.prompt)
        self._check_vocabulary("logit_bias", (token for token, _ in request.params.logit_bias))
        self._check_vocabulary("stop_token_ids", request.params.stop_token_ids)

    def _check_vocabulary(self, field: str, tokens: Iterable[int]) -> None:
        for token in tokens:
            if type(token) is not int or not 0 <= token < self.vocab_size:
                raise ConfigError(
                    field,
                    token,
                    "no token of the model has this id",
                    f"Give ids from 0 to {self.vocab_size - 1}",
                )

    def _check_counts(self, request: Request) -> None:
        params = request.params
        counts = (
            ("n", params.n, min(self.max_choices, self.max_waiting)),
            ("logprobs", params.logprobs or 0, min(self.max_logprobs, self.vocab_size)),
            (
                "prompt_logprobs",
                params.prompt_logprobs or 0,
                min(self.max_logprobs, self.vocab_size),
            ),
            ("logit_bias", len(params.logit_bias), self.max_logit_biases),
            ("stop", len(params.stop), self.max_stops),
            ("stop", max(map(len, params.stop), default=0), self.max_stop_length),
            ("stop_token_ids", len(params.stop_token_ids), self.max_stops),
        )
        for field, count, most in counts:
            if count > most:
                raise ConfigError(
                    field, count, f"this server allows at most {most}", f"Give at most {most}"
                )
