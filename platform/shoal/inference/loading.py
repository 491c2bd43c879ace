"""From a model's folder and ``serve`` settings to an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shoal.config import ServeSettings
from shoal.data.tokenizer import Tokenizer, check_vocabulary, load_tokenizer, tokenizer_name
from shoal.errors import ConfigError
from shoal.inference.engine import Engine
from shoal.inference.forward.model import ServedModel
from shoal.inference.limits import Limits
from shoal.inference.pool import EngineSizes, lone_blocks
from shoal.memory import available_bytes
from shoal.models import DecoderConfig, read_hf_config
from shoal.models.hf_folder import read_json
from shoal.ops.fixed.certify import Certificate


def load_engine(folder: Path, serve: ServeSettings, num_blocks: int | None = None) -> Engine:
    """The engine of one replica.

    ``num_blocks`` is the size of its pool where that was decided for all engines of the machine
    together; unset, this one decides, by the memory that it finds free.

    Raises ConfigError for a folder without a supported model and for settings that do not fit it,
    WorkError for damaged files.
    """
    config = DecoderConfig.from_hf(read_hf_config(folder))
    if num_blocks is None:
        sizes = EngineSizes.of(config, serve)
        num_blocks = lone_blocks(config, serve, sizes, available_bytes())
    limits = limits_of(config, serve, num_blocks)
    tokenizer = served_tokenizer(folder)
    end_ids = end_of_text_ids(folder, tokenizer)
    model = ServedModel.load(folder, serve.precision, batch_invariant=serve.batch_invariant)
    return Engine(model, limits, tokenizer=tokenizer, end_ids=end_ids)


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
    """Tokens that end an answer: those in the folder's configs, and the tokenizer's own.

    ConfigError for a file that cannot be read, or names what is no token of the model.
    """
    vocab_size = DecoderConfig.from_hf(read_hf_config(folder)).vocab_size
    found: set[int] = {tokenizer.end_of_text}
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        if path.is_file():
            value = read_json(path).get("eos_token_id")
            found.update(_checked(value if isinstance(value, list) else [value], path, vocab_size))
    return tuple(sorted(found))


def _checked(values: list[Any], path: Path, vocab_size: int) -> list[int]:
    """The ids among ``values``; null stands for none."""
    ids = [value for value in values if value is not None]
    for value in ids:
        if type(value) is not int or not 0 <= value < vocab_size:
            raise ConfigError(
                "model.path",
                str(path),
                f"its eos_token_id has {value!r}, and the model's tokens are 0 to {vocab_size - 1}",
                "Correct eos_token_id there",
            )
    return ids


def limits_of(config: DecoderConfig, serve: ServeSettings, num_blocks: int) -> Limits:
    """What an engine with a pool of ``num_blocks`` can take."""
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
        num_blocks=num_blocks,
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
