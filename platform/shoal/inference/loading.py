"""From a model's folder and ``serve`` settings to an engine."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from shoal.config import ServeSettings
from shoal.data.tokenizer import Tokenizer, check_vocabulary, load_tokenizer, tokenizer_name
from shoal.errors import ConfigError
from shoal.inference.engine import Engine
from shoal.inference.limits import Limits
from shoal.inference.memory import available_bytes
from shoal.inference.model import ServedModel
from shoal.inference.precision import activation_dtype, resolved_precision
from shoal.models import DecoderConfig, read_hf_config
from shoal.ops.fixed import KVCache
from shoal.ops.fixed.certify import Certificate

_CACHE_SHARE = 0.5
"""Of the memory that is available, what the caches of all replicas of a machine may take."""


def load_engine(folder: Path, serve: ServeSettings) -> Engine:
    """The engine of one replica.

    Raises ConfigError for a folder without a supported model and for settings that do not fit it,
    WorkError for damaged files.
    """
    limits = limits_of(folder, serve)
    tokenizer = served_tokenizer(folder)
    model = ServedModel.load(folder, serve.precision, batch_invariant=serve.batch_invariant)
    return Engine(model, limits, tokenizer=tokenizer, end_ids=end_of_text_ids(folder, tokenizer))


def certified(engine: Engine) -> Certificate:
    """What is proven of the engine's kernels on this machine.

    Raises ConfigError where one breaks the promise that ``serve.batch_invariant`` gives.
    """
    certificate = engine.model.certify(engine.limits.block_size)
    if engine.model.is_batch_invariant and not certificate.passed:
        raise ConfigError(
            "serve.batch_invariant",
            True,
            certificate.failures[0],
            "Set it to false to serve on this machine without the promise of equal bits",
        )
    return certificate


def served_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer in a model's folder, or the one of bytes for a folder without."""
    tokenizer = load_tokenizer(tokenizer_name(None, str(folder)), "model.path")
    vocab_size = DecoderConfig.from_hf(read_hf_config(folder)).vocab_size
    check_vocabulary(tokenizer, vocab_size, "model.path")
    return tokenizer


def end_of_text_ids(folder: Path, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Tokens that end an answer: those in the folder's configs, and the tokenizer's own."""
    found: set[int] = {tokenizer.end_of_text}
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        if path.is_file():
            found.update(_ids(json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")))
    return tuple(sorted(found))


def _ids(value: Any) -> Iterable[int]:
    if value is None:
        return ()
    return value if isinstance(value, list) else (value,)


def limits_of(folder: Path, serve: ServeSettings) -> Limits:
    """What an engine for the model in ``folder`` can take, before its weights are read."""
    config = DecoderConfig.from_hf(read_hf_config(folder))
    if serve.batch.tokens < serve.batch.sequences:
        raise ConfigError(
            "serve.batch.tokens",
            serve.batch.tokens,
            f"a step holds at least one token of each of {serve.batch.sequences} sequences",
            f"Give at least {serve.batch.sequences}, or lower serve.batch.sequences",
        )
    return Limits(
        vocab_size=config.vocab_size,
        context_length=config.max_position_embeddings,
        num_blocks=_num_blocks(config, serve),
        block_size=serve.kv.block_tokens,
        prefix_cache=serve.kv.prefix_cache,
        max_running=serve.batch.sequences,
        max_step_tokens=serve.batch.tokens,
        # Whoever comes passes through the queue, also on the way to a free place.
        max_waiting=serve.limits.queue + serve.batch.sequences,
        max_choices=serve.limits.choices,
        max_logprobs=max(serve.limits.logprobs, 1),
        max_stops=serve.limits.stops,
        max_stop_length=serve.limits.stop_characters,
        max_logit_biases=serve.limits.logit_bias,
    )


def _num_blocks(config: DecoderConfig, serve: ServeSettings) -> int:
    size = serve.kv.block_tokens
    if serve.kv.tokens is not None:
        return serve.kv.tokens // size
    dtype = activation_dtype(resolved_precision(serve.precision))
    block_bytes = KVCache.block_bytes(
        size, config.num_layers, config.num_key_value_heads, config.head_dim, dtype
    )
    wanted = -(-config.max_position_embeddings // size) * serve.batch.sequences
    held = int(available_bytes() * _CACHE_SHARE / serve.replicas) // block_bytes
    if held < 1:
        raise ConfigError(
            "serve.kv.tokens",
            None,
            f"the memory that is free has no room for one block of {block_bytes:,} bytes",
            "Free some, or serve fewer replicas",
        )
    return min(wanted, held)
