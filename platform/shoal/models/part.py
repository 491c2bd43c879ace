"""Cutting a decoder into runs of consecutive layers, for the stages of a pipeline."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.models.config import DecoderConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A run of layers, with the embedding where it begins the model and the head where it ends."""

    layers: range
    """Their numbers in the whole decoder."""

    is_first: bool = True
    """Whether it takes tokens, and so holds the embedding."""

    is_last: bool = True
    """Whether it makes the loss, and so holds the final norm and the head."""


def split_decoder(config: DecoderConfig, num_parts: int) -> tuple[Part, ...]:
    """The decoder in ``num_parts`` parts of as many layers each, the first ones of one more.

    Raises ValueError where there are fewer layers than parts.
    """
    if not 1 <= num_parts <= config.num_layers:
        raise ValueError(f"{config.num_layers} layers cannot be {num_parts} parts")
    size, larger = divmod(config.num_layers, num_parts)
    edges = [number * size + min(number, larger) for number in range(num_parts + 1)]
    return tuple(
        Part(
            layers=range(edges[number], edges[number + 1]),
            is_first=number == 0,
            is_last=number == num_parts - 1,
        )
        for number in range(num_parts)
    )
