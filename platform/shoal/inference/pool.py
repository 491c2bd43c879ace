"""How many blocks an engine's pool of keys and values has: what its machine can bear.

A pool takes memory only as it fills. So too large a one fails no start, but hours later, when the
kernel ends the process; and weights and processes are set aside before pools get their share.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shoal.config import ServeSettings
from shoal.errors import ConfigError
from shoal.inference.forward.precision import activation_dtype, resolved_precision
from shoal.inference.forward.sizes import weight_bytes
from shoal.models import DecoderConfig
from shoal.ops.fixed import KVCache

PROCESS_BYTES = 256 * 2**20
"""Less than any process of ours takes: Python with torch and Ray alone."""

_PARTS = 2
"""Of what is left, one part is for the pools whose size nobody gave; steps compute in the rest."""

_SMALL = 4
"""A pool is hardly one if it has less than this part of what its engine alone would give it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSizes:
    """What an engine keeps in memory."""

    weight_bytes: int

    block_bytes: int
    """Of a block of keys and values, over all layers."""

    @staticmethod
    def of(config: DecoderConfig, serve: ServeSettings) -> EngineSizes:
        """Those of an engine for a model of ``config``, without its weights.

        ConfigError for a family or a precision that no kernels serve.
        """
        return EngineSizes(
            weight_bytes=weight_bytes(
                config, serve.precision, batch_invariant=serve.batch_invariant
            ),
            block_bytes=KVCache.block_bytes(
                serve.kv.block_tokens,
                config.num_layers,
                config.num_key_value_heads,
                config.head_dim,
                activation_dtype(resolved_precision(serve.precision)),
            ),
        )

    @property
    def least_bytes(self) -> int:
        """What a machine needs free for an engine with the smallest pool of its own choice."""
        return self.weight_bytes + PROCESS_BYTES + _PARTS * self.block_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """Memory of one machine, and who is still to find room in it."""

    free_bytes: int

    num_engines: int
    """Engines whose weights are not loaded yet."""

    num_processes: int
    """Engines and frontends that are not started yet."""

    num_pools: int
    """Pools that share what weights and processes leave."""

    @staticmethod
    def beside_others(serve: ServeSettings, sizes: EngineSizes, free_bytes: int) -> Room:
        """Of an engine in this process, which knows nothing of the others on its machine.

        A pool of a given size asks for itself alone. Otherwise the engine reckons with as many
        others, all still to come, as would fit beside it, and takes the share of one of all: so
        engines that find each other loaded, or half so, leave room for each other all the same.
        """
        if serve.kv.tokens is not None:
            return Room(free_bytes=free_bytes, num_engines=1, num_processes=0, num_pools=1)
        most = (free_bytes + PROCESS_BYTES) // sizes.least_bytes
        num_engines = max(1, min(serve.replicas, most))
        return Room(
            free_bytes=free_bytes,
            num_engines=num_engines,
            num_processes=num_engines - 1,
            num_pools=serve.replicas,
        )

    def left_bytes(self, sizes: EngineSizes) -> int:
        """What weights and processes leave to the pools; below 0 where they do not fit."""
        needed = self.num_engines * sizes.weight_bytes + self.num_processes * PROCESS_BYTES
        return self.free_bytes - needed

    def held_blocks(self, sizes: EngineSizes) -> int:
        """Blocks for each pool whose size nobody gave."""
        return max(0, self.left_bytes(sizes)) // _PARTS // self.num_pools // sizes.block_bytes

    def num_fitting(self, sizes: EngineSizes) -> int:
        """Engines that fit with a block or more each, beside the processes of others."""
        others = (self.num_processes - self.num_engines) * PROCESS_BYTES
        return max(0, (self.free_bytes - others) // sizes.least_bytes)


def given_blocks(serve: ServeSettings) -> int | None:
    """Blocks of the pool that ``serve.kv.tokens`` asks for; None where it is unset."""
    return None if serve.kv.tokens is None else serve.kv.tokens // serve.kv.block_tokens


def whole_blocks(config: DecoderConfig, serve: ServeSettings) -> int:
    """Blocks for one context in each place of the batch: no pool without a size given is larger."""
    return _context_blocks(config, serve) * serve.batch.sequences


def lone_blocks(
    config: DecoderConfig, serve: ServeSettings, sizes: EngineSizes, free_bytes: int
) -> int:
    """Blocks of the pool of an engine in this process, which knows nothing of others.

    ConfigError where the pool does not fit, and where it is hardly one if others come to the same
    machine: only who places them knows whether they do.
    """
    room = Room.beside_others(serve, sizes, free_bytes)
    alone = replace(room, num_engines=1, num_processes=0)
    held = room.held_blocks(sizes)
    is_small = _SMALL * room.left_bytes(sizes) < alone.left_bytes(sizes)
    if serve.kv.tokens is None and is_small and held < _context_blocks(config, serve):
        raise ConfigError(
            "serve.kv.tokens",
            None,
            f"{room.num_engines} of {serve.replicas} engines fit into the {free_bytes:,} bytes free"
            f" here; if they come, {held * serve.kv.block_tokens} tokens are left to each",
            "Give the tokens that one engine is to hold",
        )
    return pool_blocks(config, serve, sizes, room)


def pool_blocks(config: DecoderConfig, serve: ServeSettings, sizes: EngineSizes, room: Room) -> int:
    """Blocks of one engine's pool in ``room``; ConfigError where they, or one, do not fit."""
    given, size = given_blocks(serve), serve.kv.block_tokens
    left = room.left_bytes(sizes)
    most = left // room.num_pools // sizes.block_bytes
    if given is None:
        if (held := room.held_blocks(sizes)) >= 1:
            return min(whole_blocks(config, serve), held)
    elif given <= most:
        return given
    elif most >= 1:
        times = f" in {room.num_pools} engines" if room.num_pools > 1 else ""
        raise ConfigError(
            "serve.kv.tokens",
            serve.kv.tokens,
            f"they take {given * sizes.block_bytes * room.num_pools:,} bytes{times}, and beside "
            f"weights and processes {left:,} are free",
            f"Use at most {most * size}, or leave it out",
        )
    fitting = room.num_fitting(sizes)
    raise ConfigError(
        "serve.replicas",
        serve.replicas,
        f"each takes {sizes.weight_bytes:,} bytes for its weights, {PROCESS_BYTES:,} at least for "
        f"its process and {sizes.block_bytes:,} for a block of keys and values, and "
        f"{room.free_bytes:,} are free",
        f"Use at most {fitting}"
        if fitting
        else "Free some memory, or use a smaller serve.precision",
    )


def _context_blocks(config: DecoderConfig, serve: ServeSettings) -> int:
    return -(-config.max_position_embeddings // serve.kv.block_tokens)
