"""Which matrices of a decoder multiply in MXFP8.

The linear layers of attention and MLPs, shared experts among them, and the routed experts. Router,
norms, embedding, output head and the shared expert's gate never do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from shoal.errors import ConfigError
from shoal.models.config import DecoderConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Bf16Choice:
    """What of a decoder stays in bf16 although the rest multiplies in MXFP8."""

    at_start: int = 0
    """Layers at the start."""

    at_end: int = 0
    """Layers at the end."""

    patterns: tuple[str, ...] = ()
    """Names of modules or parameters, with ``*`` and ``?``; what is beneath stays in bf16 too."""


def matrix_names(config: DecoderConfig) -> Iterator[str]:
    """Every matrix of the whole decoder that could multiply in MXFP8, by its parameter's name."""
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        yield from (f"{prefix}.self_attn.{kind}_proj.weight" for kind in "qkvo")
        mlp: str | None = f"{prefix}.mlp"
        if config.sparse_layers[layer]:
            assert config.experts is not None
            yield from (f"{mlp}.experts.{kind}_proj" for kind in ("gate_up", "down"))
            is_shared = config.experts.shared_intermediate_size is not None
            mlp = f"{mlp}.shared_expert" if is_shared else None
        if mlp is not None:
            yield from (f"{mlp}.{kind}_proj.weight" for kind in ("gate", "up", "down"))


def choose_mxfp8(config: DecoderConfig, bf16: Bf16Choice) -> frozenset[str]:
    """The parameters that multiply in MXFP8: all that ``bf16`` does not keep.

    Raises:
        ConfigError: for a pattern that names none of them, and where none is left.
    """
    names = list(matrix_names(config))
    for pattern in bf16.patterns:
        if not any(_is_named(name, pattern) for name in names):
            raise ConfigError(
                "precision.keep_bf16",
                pattern,
                "no linear or expert layer of this model has such a name",
                f"Names are such as {names[0]} and {names[-1]}; * stands for any text, and the "
                "name of a module for all beneath it",
            )
    last = config.num_layers - bf16.at_end
    layers = {f"model.layers.{n}." for n in range(config.num_layers) if bf16.at_start <= n < last}
    chosen = frozenset(
        name
        for name in names
        if name[: name.index(".", len("model.layers.")) + 1] in layers
        and not any(_is_named(name, pattern) for pattern in bf16.patterns)
    )
    if not chosen:
        raise ConfigError(
            "precision.compute",
            "mxfp8",
            f"all {len(names)} matrices of the model are kept in bf16",
            "Keep fewer, or set it to bf16",
        )
    return chosen


def _is_named(name: str, pattern: str) -> bool:
    """Whether ``pattern`` fits a parameter or something that it is beneath."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:end]), pattern) for end in range(1, len(parts) + 1))
