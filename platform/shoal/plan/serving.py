"""What serving a model will take, known before an engine starts; or the reasons to refuse it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shoal.config import ServeConfig, ServeSettings
from shoal.errors import ConfigError, ConfigErrors
from shoal.inference.forward.precision import resolved_precision
from shoal.inference.limits import Limits
from shoal.inference.pool import PROCESS_BYTES
from shoal.inference.refusals import Host, check_serving
from shoal.models import DecoderConfig, read_hf_config
from shoal.plan.groups import whole_shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingPlan:
    """Engines of one model, their weights and caches; ``plan_serving`` makes it."""

    name: str
    """Under which clients ask for the model."""

    model_type: str
    num_parameters: int

    precision: str
    """``fp32``, ``bf16`` or ``mxfp8``: what the layers' weights are packed as."""

    settings: ServeSettings

    limits: Limits
    """What one engine can take."""

    weight_bytes: int
    """Of one engine."""

    block_bytes: int
    """Of a block of keys and values, over all layers."""

    host: Host | None
    """The machine that serves; None where it is a cluster's."""

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values."""
        return self.block_bytes // self.limits.block_size

    @property
    def kv_bytes(self) -> int:
        """Bytes of one engine's pool of keys and values."""
        return self.limits.num_blocks * self.block_bytes

    @property
    def engine_bytes(self) -> int:
        """Bytes of one engine's weights, keys and values."""
        return self.weight_bytes + self.kv_bytes

    @property
    def num_longest(self) -> int:
        """Requests as long as the model's context that one engine computes at a time."""
        # The last token that is generated is never computed, so it takes no room in the pool.
        blocks = self.limits.num_blocks_for(max(self.limits.context_length - 1, 1))
        return min(self.limits.num_blocks // blocks, self.limits.max_running)

    @property
    def process_bytes(self) -> int:
        """The least that the processes themselves take, engines' and frontends'."""
        return (self.settings.replicas + self.settings.num_frontends) * PROCESS_BYTES

    @property
    def node_bytes(self) -> int:
        """What a machine must have free for all engines and frontends."""
        return self.settings.replicas * self.engine_bytes + self.process_bytes

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        replicas = self.settings.replicas
        return {
            "name": self.name,
            "model": {"model_type": self.model_type, "parameters": self.num_parameters},
            "precision": self.precision,
            "batch_invariant": self.settings.batch_invariant,
            "replicas": replicas,
            "frontends": self.settings.num_frontends,
            "threads": self.settings.threads,
            "cpus": self.settings.num_cpus,
            "engine": {
                "weight_bytes": self.weight_bytes,
                "kv_bytes": self.kv_bytes,
                "bytes": self.engine_bytes,
                "kv_token_bytes": self.token_bytes,
                "kv_block_bytes": self.block_bytes,
                "kv_block_tokens": self.limits.block_size,
                "kv_blocks": self.limits.num_blocks,
                "kv_tokens": self.limits.pool_tokens,
                "context_tokens": self.limits.context_length,
                "longest_requests": self.num_longest,
            },
            "node": {
                "weight_bytes": replicas * self.weight_bytes,
                "kv_bytes": replicas * self.kv_bytes,
                "process_bytes": self.process_bytes,
                "bytes": self.node_bytes,
                "free_bytes": None if self.host is None else self.host.free_bytes,
            },
        }


def plan_serving(config: ServeConfig, host: Host | None) -> ServingPlan:
    """The plan of serving as ``config`` says, all of it on ``host``.

    Without one, a pool that ``serve.kv.tokens`` does not size has the most that it may have.
    Reads the model's config and the names and shapes of its weights.

    Raises:
        ConfigError: for what ``shoal serve`` refuses of a model, its settings and the machine.
        WorkError: for a damaged file of weights.
    """
    settings = config.serve
    limits, sizes = check_serving(config, host)
    decoder = DecoderConfig.from_hf(read_hf_config(config.folder))
    return ServingPlan(
        name=config.served_name,
        model_type=decoder.model_type,
        num_parameters=sum(shape.numel() for shape in whole_shapes(decoder).values()),
        precision=resolved_precision(settings.precision),
        settings=settings,
        limits=limits,
        weight_bytes=sizes.weight_bytes,
        block_bytes=sizes.block_bytes,
        host=host,
    )


def problems_of(error: ConfigError) -> tuple[ConfigError, ...]:
    """Each of the mistakes that ``error`` tells of."""
    return error.problems if isinstance(error, ConfigErrors) else (error,)


def refusal_as_dict(error: ConfigError) -> dict[str, Any]:
    """Why serving is refused, as plain values for JSON."""
    return {
        "refused": [
            {
                "field": problem.field,
                "value": str(problem.value),
                "problem": problem.problem,
                "remedy": problem.remedy,
            }
            for problem in problems_of(error)
        ]
    }
