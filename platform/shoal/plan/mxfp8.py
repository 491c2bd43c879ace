"""Which parameters of a run multiply in MXFP8."""

from __future__ import annotations

from shoal.config import Config
from shoal.models import Bf16Choice, DecoderConfig, choose_mxfp8


def mxfp8_parameters(config: Config, decoder: DecoderConfig) -> frozenset[str]:
    """Names of the parameters of ``decoder`` that multiply in MXFP8; none without ``mxfp8``.

    Raises ``ConfigError`` for a list of exceptions that does not fit the model.
    """
    settings = config.precision
    if settings.compute != "mxfp8":
        return frozenset()
    kept = settings.first_last_layers_bf16
    bf16 = Bf16Choice(
        at_start=settings.num_layers_at_start_in_bf16 if kept else 0,
        at_end=settings.num_layers_at_end_in_bf16 if kept else 0,
        patterns=settings.keep_bf16,
    )
    return choose_mxfp8(decoder, bf16)
