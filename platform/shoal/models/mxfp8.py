"""Which matrices of a decoder multiply in MXFP8.

The linear layers of attention and MLPs, shared experts among them, and the routed experts. Router,
norms, embedding, output head and the shared expert's gate never do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from shoal.errors import ConfigError
from shoal.models.config import DecoderConfig
from shoal.ops.mxfp8 import BLOCK


@dataclass(frozen=True, kw_only=True, slots=True)
class Bf16Choice:
    """What of a decoder stays in bf16 although the rest multiplies in MXFP8."""

    at_start: int = 0
    """Layers at the start."""

    at_end: int = 0
    """Layers at the end."""

    patterns: tuple[str, ...] = ()
    """Names of modules or parameters, with ``*`` and ``?``; what is beneath stays in bf16 too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Matrix:
    """A parameter that can multiply in MXFP8."""

    name: str
    """Of the parameter."""

    rows: int
    """Of one matrix; the routed experts' are stacked."""

    columns: int
    """Of one matrix."""


def matrices(config: DecoderConfig) -> Iterator[Matrix]:
    """Every parameter of the whole decoder that can multiply in MXFP8."""
    for layer in range(config.num_layers):
        yield from layer_matrices(config, layer)


def layer_matrices(config: DecoderConfig, layer: int) -> Iterator[Matrix]:
    """Those of one layer."""
    hidden, experts, prefix = config.hidden_size, config.experts, f"model.layers.{layer}"
    queries, keys = (n * config.head_dim for n in (config.num_heads, config.num_key_value_heads))
    for kind, width in (("q", queries), ("k", keys), ("v", keys)):
        yield Matrix(name=f"{prefix}.self_attn.{kind}_proj.weight", rows=width, columns=hidden)
    yield Matrix(name=f"{prefix}.self_attn.o_proj.weight", rows=hidden, columns=queries)
    if not config.sparse_layers[layer]:
        yield from _mlp(f"{prefix}.mlp", hidden, config.intermediate_size)
        return
    assert experts is not None
    path, width = f"{prefix}.mlp.experts", experts.intermediate_size
    yield Matrix(name=f"{path}.gate_up_proj", rows=2 * width, columns=hidden)
    yield Matrix(name=f"{path}.down_proj", rows=hidden, columns=width)
    if experts.shared_intermediate_size is not None:
        shared = f"{prefix}.mlp.{experts.shared_name}"
        yield from _mlp(shared, hidden, experts.shared_intermediate_size)


def _mlp(path: str, hidden: int, width: int) -> Iterator[Matrix]:
    for kind in ("gate", "up"):
        yield Matrix(name=f"{path}.{kind}_proj.weight", rows=width, columns=hidden)
    yield Matrix(name=f"{path}.down_proj.weight", rows=hidden, columns=width)


def choose_mxfp8(config: DecoderConfig, bf16: Bf16Choice) -> frozenset[str]:
    """The parameters that multiply in MXFP8: all that ``bf16`` does not keep.

    Raises:
        ConfigError: for a pattern that names none of them, and where none is left.
    """
    names = [matrix.name for matrix in matrices(config)]
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


def check_quantized_gather(
    config: DecoderConfig, names: Collection[str], *, is_asked_for: bool
) -> None:
    """Raise ``ConfigError`` unless the parameters ``names`` are whole blocks in both directions.

    ``is_asked_for`` says that ``precision.parameter_gather`` wants them to travel so; else they do
    by ``precision.compute`` alone, and the error names that.

    Inside a product the last block is filled up with zeros; weights on their way have no room for
    them, and a block cannot hold parts of two experts.
    """
    odd = [m for m in matrices(config) if m.name in names and (m.rows % BLOCK or m.columns % BLOCK)]
    if odd:
        kinds = {matrix.name.rpartition(".layers.")[2].partition(".")[2] for matrix in odd}
        raise ConfigError(
            "precision.parameter_gather" if is_asked_for else "precision.compute",
            "mxfp8",
            f"weights travel in it too, in blocks of {BLOCK} rows and columns, and {odd[0].name} "
            f"is of {odd[0].rows} x {odd[0].columns}; {len(odd)} of the {len(names)} parameters "
            "that multiply in MXFP8 are no whole blocks",
            "Set precision.parameter_gather to bf16, which changes no result, or list in "
            "precision.keep_bf16 " + ", ".join(f"*.{kind}" for kind in sorted(kinds)),
        )


def _is_named(name: str, pattern: str) -> bool:
    """Whether ``pattern`` fits a parameter or something that it is beneath."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:end]), pattern) for end in range(1, len(parts) + 1))
