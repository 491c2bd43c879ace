"""How a model is served: replicas, address, cache, limits, keys."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from shoal.config.section import Section, in_vain, refuse
from shoal.errors import ConfigError


class KVSettings(Section):
    """``serve.kv``: the paged cache of keys and values of each replica."""

    tokens: int | None = Field(default=None, ge=1)
    """Tokens that one replica's cache holds; unset sizes it by the model's context and
    ``batch.sequences``; all pools share half of the memory that is free beside weights and
    processes. On a cluster, give it where several engines may come to one node."""

    block_tokens: int = Field(default=64, ge=16, le=2**16)
    """Tokens per block, a multiple of 16: what the prefix cache keeps and shares."""

    prefix_cache: bool = True
    """Keep the blocks of finished requests for later ones that begin in the same way."""

    @model_validator(mode="after")
    def _blocks_are_whole(self) -> KVSettings:
        below = self.block_tokens // 16 * 16
        if below != self.block_tokens:
            problem, remedy = "a block is a multiple of 16 tokens", f"Use {below} or {below + 16}"
            refuse([ConfigError("block_tokens", self.block_tokens, problem, remedy)])
        return self


class BatchSettings(Section):
    """``serve.batch``: what one engine step may hold."""

    sequences: int = Field(default=32, ge=1, le=2**14)
    """Sequences that one replica computes at a time; the others wait."""

    tokens: int = Field(default=512, ge=1, le=2**20)
    """Tokens per step; longer prompts are computed in chunks."""


class LimitSettings(Section):
    """``serve.limits``: what one request and one client may ask for."""

    requests: int = Field(default=256, ge=1)
    """Requests that one frontend holds at a time; one more is answered with 429."""

    queue: int = Field(default=256, ge=0)
    """Sequences that may wait in one replica; a request that finds no room anywhere is answered
    with 429."""

    retry_after_s: int = Field(default=1, ge=1)
    """Seconds that a 429 or 503 asks the client to wait."""

    body_bytes: int = Field(default=4 * 2**20, ge=1024)
    """Bytes of a request's body."""

    read_timeout_s: float = Field(default=30.0, gt=0)
    """Seconds within which a request's body has to arrive."""

    prompt_tokens: int | None = Field(default=None, ge=1)
    """Tokens of one prompt; unset: the model's context."""

    prompts: int = Field(default=64, ge=1)
    """Prompts in one request."""

    messages: int = Field(default=2048, ge=1)
    """Messages in one chat."""

    choices: int = Field(default=64, ge=1)
    """Choices of one request: its prompts times ``n``."""

    logprobs: int = Field(default=20, ge=0)
    """Log-probabilities per token in addition to the chosen one's."""

    stops: int = Field(default=16, ge=1)
    """Stop texts of one request, and stop tokens."""

    stop_characters: int = Field(default=256, ge=1)
    """Length of one stop text."""

    logit_bias: int = Field(default=1024, ge=1)
    """Entries of ``logit_bias``."""

    unread_tokens: int = Field(default=8192, ge=1)
    """Generated tokens that may wait for one slow reader; one more ends its request. Applies behind
    HAProxy only: Serve's own proxy takes all at once, and keeps what the client has not read."""

    write_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds within which a client has to take what was sent, or its request is ended. Applies
    behind HAProxy only, as ``unread_tokens``."""

    keep_alive_s: float = Field(default=15.0, gt=0)
    """Seconds of silence after which a stream sends a comment."""


class AuthSettings(Section):
    """``serve.auth``: who may ask. The keys themselves are never in the configuration."""

    keys_file: str | None = Field(default=None, min_length=1)
    """File with one API key a line; blank lines and lines that begin with ``#`` do not count."""

    keys_variable: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Environment variable with API keys, separated by commas. With neither of the two, everyone
    who reaches the port is served."""


class JournalSettings(Section):
    """``serve.journal``: requests and generated tokens on disk, written beside the engines."""

    dir: str | None = Field(default=None, min_length=1)
    """Folder of the journals, one in it for each engine, on the engine's machine; unset: nothing is
    written."""

    fsync: Literal["always", "interval", "never"] = "interval"
    """When batches are forced onto the disk: ``always`` each at once, ``interval`` one every
    ``interval_s``, ``never`` leaves that to the system, and then ``durable`` requests are
    refused."""

    interval_s: float = Field(default=0.2, gt=0)
    """Seconds from one batch to the next, unless ``fsync`` is ``always``."""

    queue_tokens: int = Field(default=4 * 2**20, ge=1)
    """Tokens of one engine, prompts included, that may wait for the disk."""

    when_full: Literal["drop", "refuse"] = "drop"
    """What happens if more would wait: ``drop`` leaves tokens out of the journal and counts them;
    ``refuse`` turns new requests away with 503, and what those under way still generate is kept."""

    ack_timeout_s: float = Field(default=30.0, gt=0)
    """Seconds that the end of a ``durable`` request's answer waits for the disk; after that it says
    that its tokens are not there."""

    segment_bytes: int = Field(default=64 * 2**20, ge=1)
    """Bytes at which a file is closed and another begun."""

    keep_bytes: int | None = Field(default=None, ge=0)
    """Bytes of closed files that each engine's folder keeps: whenever a file is begun, the oldest
    beyond that are deleted; unset: none are."""

    @model_validator(mode="after")
    def _is_kept_somewhere(self) -> JournalSettings:
        found: list[ConfigError] = []
        if self.dir is None:
            names = [name for name in type(self).model_fields if name != "dir"]
            problem = "without a folder no journal is kept"
            found += in_vain(self, names, problem, "Leave it out, or set serve.journal.dir")
        else:
            remedy = "Leave it out, or set serve.journal.fsync to interval"
            if self.fsync == "always":
                problem = "with fsync = always no batch waits for an interval"
                found += in_vain(self, ("interval_s",), problem, remedy)
            if self.fsync == "never":
                problem = "with fsync = never no request can be durable"
                found += in_vain(self, ("ack_timeout_s",), problem, remedy)
        refuse(found)
        return self


class ServeSettings(Section):
    """``serve``: replicas, address, engine, limits."""

    host: str = Field(default="127.0.0.1", min_length=1)
    """Address that the HTTP port listens on."""

    port: int = Field(default=8000, ge=0, le=65535)
    """HTTP port; 0 takes a free one."""

    replicas: int = Field(default=1, ge=1, le=1024)
    """Engines, each with the whole model: the data-parallel size."""

    frontends: int | None = Field(default=None, ge=1, le=1024)
    """HTTP processes, which also tokenize; unset: as many as ``replicas``."""

    model_name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:-]{0,199}$")
    """Name under which clients ask for the model; unset: its folder's name."""

    precision: Literal["auto", "fp32", "bf16", "mxfp8"] = "auto"
    """Format of weights and products; ``auto`` is bf16 where the device has bf16 units and fp32
    elsewhere."""

    batch_invariant: bool = True
    """Compute every answer in an order that does not depend on who else is served; ``false`` uses
    torch's own products, whose bits do depend on it."""

    threads: int = Field(default=1, ge=1, le=1024)
    """CPU threads of each replica."""

    stall_s: float = Field(default=60.0, gt=0)
    """Seconds that one step of an engine may take, without those for which its process was stopped
    or swapped out, before the process is ended and another started; also how long requests wait for
    an engine that stands still and that no other can replace."""

    drain_timeout_s: float = Field(default=30.0, ge=0, le=86_400)
    """Seconds that requests under way have to end when the server is told to end, and when an
    upgrade replaces the process that they came through; what is not over then is cut off."""

    kv: KVSettings = KVSettings()
    """The paged cache of keys and values of each replica."""

    batch: BatchSettings = BatchSettings()
    """What one engine step may hold."""

    limits: LimitSettings = LimitSettings()
    """What one request and one client may ask for."""

    auth: AuthSettings = AuthSettings()
    """Who may ask. The keys themselves are never in the configuration."""

    journal: JournalSettings = JournalSettings()
    """Requests and generated tokens on disk, written beside the engines."""

    @model_validator(mode="after")
    def _one_prompt_fits(self) -> ServeSettings:
        wanted, held = self.limits.prompt_tokens, self.kv.tokens
        found = []
        if wanted is not None and held is not None and wanted >= held:
            found.append(
                ConfigError(
                    "limits.prompt_tokens",
                    wanted,
                    f"the cache holds {held} tokens, and a prompt needs one more to be answered",
                    f"Give less than {held}, or raise serve.kv.tokens",
                )
            )
        if self.kv.tokens is not None and self.kv.tokens < self.kv.block_tokens:
            found.append(
                ConfigError(
                    "kv.tokens",
                    self.kv.tokens,
                    f"one block alone holds {self.kv.block_tokens} tokens",
                    "Give at least one block",
                )
            )
        refuse(found)
        return self

    @property
    def num_frontends(self) -> int:
        """HTTP processes: ``frontends``, or else one for each replica."""
        return self.replicas if self.frontends is None else self.frontends

    @property
    def num_cpus(self) -> int:
        """CPUs that engines and frontends reserve."""
        return self.replicas * self.threads + self.num_frontends
