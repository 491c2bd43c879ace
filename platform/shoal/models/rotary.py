"""Rotary position embedding: the frequencies of each scaling variant.

Source of the embedding: Su et al., "RoFormer", https://arxiv.org/abs/2104.09864. Source of the
variants: ``linear`` divides positions; ``dynamic`` stretches the base past the trained context;
``yarn`` is Peng et al., https://arxiv.org/abs/2309.00071; ``llama3`` is the scheme of Llama 3.1.
Frequencies are computed when they are needed, from the config alone, so that a model built on the
meta device holds no buffer that would have to be filled later.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shoal import ops
from shoal.errors import ConfigError

FIELD = "model.config.rope_parameters"


@dataclass(frozen=True, kw_only=True, slots=True)
class RotaryConfig:
    """How positions turn into angles."""

    kind: str = "default"
    """``default``, ``linear``, ``dynamic``, ``yarn`` or ``llama3``."""

    theta: float = 10_000.0
    """Base of the geometric series of wavelengths."""

    factor: float = 1.0
    """How many times longer the context is than the one trained first; unused by ``default``."""

    original_context: int | None = None
    """Context that was trained first, in tokens; only ``yarn`` and ``llama3``."""

    low_frequency: float = 1.0
    """``llama3``: wavelengths above ``original_context / low_frequency`` are stretched whole."""

    high_frequency: float = 4.0
    """``llama3``: wavelengths below ``original_context / high_frequency`` stay."""

    beta_fast: float = 32.0
    """``yarn``: rotations over the original context above which a dimension stays."""

    beta_slow: float = 1.0
    """``yarn``: rotations over the original context below which a dimension is stretched whole."""

    truncate: bool = True
    """``yarn``: whether the borders of the ramp are rounded outwards to whole dimensions."""

    attention_factor: float = 1.0
    """``yarn``: factor of cosine and sine."""

    @staticmethod
    def from_hf(hf: Mapping[str, Any], default_theta: float, context: int) -> RotaryConfig:
        """Read ``rope_parameters``, or ``rope_scaling`` and ``rope_theta`` of older files.

        ``context`` is ``max_position_embeddings``. Raises ``ConfigError`` for other kinds.
        """
        given = _given(hf)
        kind = given.get("rope_type") or given.get("type") or "default"
        thetas = (given.get("rope_theta"), hf.get("rope_theta"), default_theta)
        theta = next(value for value in thetas if value is not None)
        _check(hf, given, kind, theta)
        original = None
        if kind in ("yarn", "llama3"):
            original = int(
                _positive(
                    "original_max_position_embeddings",
                    hf.get("original_max_position_embeddings")
                    or given.get("original_max_position_embeddings")
                    or context,
                    kind,
                )
            )
        factor = given.get("factor")
        if factor is None and kind == "yarn" and original is not None:
            factor = context / original
        factor = 1.0 if kind == "default" else _positive("factor", factor, kind)
        return RotaryConfig(
            kind=kind,
            theta=float(theta),
            factor=factor,
            original_context=original,
            **_llama3_fields(given, kind),
            **_yarn_fields(given, kind, factor),
        )


def _given(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """The mapping under whichever of the two keys holds one."""
    for key in ("rope_scaling", "rope_parameters"):
        value = hf.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(
                f"model.config.{key}",
                value,
                "it must be a mapping or null",
                "Give, say, {rope_type: linear, factor: 2.0}",
            )
        if value:
            return value
    return {}


def _check(hf: Mapping[str, Any], given: Mapping[str, Any], kind: Any, theta: Any) -> None:
    if not isinstance(kind, str) or kind not in _FREQUENCIES:
        raise ConfigError(
            f"{FIELD}.rope_type",
            kind,
            "this rotary variant is not supported",
            f"Take one of {', '.join(_FREQUENCIES)}",
        )
    if not isinstance(theta, int | float) or theta <= 1:
        raise ConfigError(
            f"{FIELD}.rope_theta", theta, "the base must be a number above 1", "Give, say, 10000"
        )
    for place in (hf, given):
        if place.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise ConfigError(
                "model.config.partial_rotary_factor",
                place["partial_rotary_factor"],
                "these families rotate whole heads",
                "Remove the key",
            )
    if hf.get("rope_interleaved"):
        raise ConfigError(
            "model.config.rope_interleaved",
            True,
            "query and key rows must be in the order of two halves",
            "Permute the rows and set it to false",
        )


def _positive(name: str, value: Any, kind: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(
            f"{FIELD}.{name}", value, f"{kind} needs a positive number here", f"Set {name}"
        )
    return float(value)


def _llama3_fields(given: Mapping[str, Any], kind: str) -> dict[str, Any]:
    if kind != "llama3":
        return {}
    low = _positive("low_freq_factor", given.get("low_freq_factor"), kind)
    high = _positive("high_freq_factor", given.get("high_freq_factor"), kind)
    if high <= low:
        raise ConfigError(
            f"{FIELD}.high_freq_factor",
            high,
            f"it must be above low_freq_factor, {low}",
            "Swap or correct them",
        )
    return {"low_frequency": low, "high_frequency": high}


def _yarn_fields(given: Mapping[str, Any], kind: str, factor: float) -> dict[str, Any]:
    if kind != "yarn":
        return {}
    attention_factor = given.get("attention_factor")
    scale, scale_all = given.get("mscale"), given.get("mscale_all_dim")
    if attention_factor is None and scale and scale_all:
        scale = _positive("mscale", scale, kind)
        scale_all = _positive("mscale_all_dim", scale_all, kind)
        attention_factor = _yarn_scale(factor, scale) / _yarn_scale(factor, scale_all)
    elif attention_factor is None:
        attention_factor = _yarn_scale(factor, 1.0)
    return {
        "beta_fast": _positive("beta_fast", given.get("beta_fast") or 32, kind),
        "beta_slow": _positive("beta_slow", given.get("beta_slow") or 1, kind),
        "truncate": bool(given.get("truncate", True)),
        "attention_factor": _positive("attention_factor", attention_factor, kind),
    }


def _yarn_scale(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _wavenumbers(config: RotaryConfig, head_dim: int, device: torch.device) -> torch.Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    return 1.0 / (config.theta**exponents)


def _linear(config: RotaryConfig, head_dim: int, device: torch.device) -> torch.Tensor:
    return _wavenumbers(config, head_dim, device) / config.factor


def _llama3(config: RotaryConfig, head_dim: int, device: torch.device) -> torch.Tensor:
    assert config.original_context is not None
    frequencies = _wavenumbers(config, head_dim, device)
    rotations = config.original_context * frequencies / (2 * math.pi)
    share = (rotations - config.low_frequency) / (config.high_frequency - config.low_frequency)
    share = share.clamp(0, 1)
    return (1 - share) * frequencies / config.factor + share * frequencies


def _yarn(config: RotaryConfig, head_dim: int, device: torch.device) -> torch.Tensor:
    assert config.original_context is not None
    original = config.original_context

    def dimension(rotations: float) -> float:
        numerator = head_dim * math.log(original / (rotations * 2 * math.pi))
        return numerator / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # keeps the ramp's slope finite
    steps = torch.arange(head_dim // 2, dtype=torch.float32, device=device)
    stretched = ((steps - low) / (high - low)).clamp(0, 1)
    frequencies = _wavenumbers(config, head_dim, device)
    return frequencies / config.factor * stretched + frequencies * (1 - stretched)


_FREQUENCIES = {
    "default": _wavenumbers,
    "linear": _linear,
    "dynamic": _wavenumbers,  # equal to the default inside the trained context
    "yarn": _yarn,
    "llama3": _llama3,
}


def rotary_frequencies(config: RotaryConfig, head_dim: int, device: torch.device) -> torch.Tensor:
    """Radians per position of each pair of a head's elements: ``[head_dim // 2]``, fp32."""
    return _FREQUENCIES[config.kind](config, head_dim, device)


def rotary_angles(
    config: RotaryConfig, head_dim: int, positions: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine for ``positions``, each ``[*positions.shape, head_dim // 2]`` in ``dtype``.

    The angles are computed in fp32; ``yarn`` scales both by its attention factor.
    """
    frequencies = rotary_frequencies(config, head_dim, positions.device)
    angles = positions.unsqueeze(-1).float() * frequencies
    cosine, sine = ops.cosine_and_sine(angles)
    factor = config.attention_factor
    return (cosine * factor).to(dtype), (sine * factor).to(dtype)
