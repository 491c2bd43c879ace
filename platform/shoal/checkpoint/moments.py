"""Moments that were saved in 8 bits and are wanted in floating point, or the other way round.

Formats of floating point are converted element by element as they are read. Codes in 8 bits mean
nothing without their scales (``shoal.ops.eight_bit``), so both are read beside the moment and made
into it, or it is read in fp32 and made into both. Rows have scales of their own, so each rank
converts its own rows, and the result does not depend on the layout.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from shoal.checkpoint.entry import Entry
from shoal.checkpoint.fit import is_eight_bit
from shoal.checkpoint.index import Stored
from shoal.ops import eight_bit


@dataclass(frozen=True, slots=True, kw_only=True)
class _Conversion:
    """One moment: what of it is read, and what is to be filled from that."""

    signed: bool
    read: tuple[torch.Tensor, ...]
    wanted: tuple[torch.Tensor, ...]
    """The values, or codes and scales; as of ``read``."""

    def run(self) -> None:
        """Fill what is wanted."""
        made: tuple[torch.Tensor, ...]
        if len(self.read) == 1:
            made = eight_bit.quantize(self.read[0], signed=self.signed)
        else:
            made = (eight_bit.dequantize(*self.read, signed=self.signed),)
        for target, value in zip(self.wanted, made, strict=True):
            target.copy_(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What to read in the place of what is wanted; call ``finish`` once it is read."""

    entries: list[Entry]
    _conversions: tuple[_Conversion, ...]

    def finish(self) -> None:
        """Fill what is wanted from what was read."""
        for conversion in self._conversions:
            conversion.run()


def as_saved(entries: Sequence[Entry], stored: Mapping[str, Stored]) -> Reading:
    """The entries, but moments of the other kind in the way in which they are ``stored``."""
    wanted = {entry.key: entry for entry in entries}
    reading, conversions = dict(wanted), []
    for entry in entries:
        if entry.path[0] != "optimizer" or entry.key not in stored:
            continue
        codes_wanted = _scales(entry).key in wanted
        codes_saved = is_eight_bit(stored[entry.key]) and _scales(entry).key in stored
        if codes_wanted == codes_saved:
            continue
        scales = wanted[_scales(entry).key] if codes_wanted else None
        found = _saved(entry, codes_saved=codes_saved)
        targets = (entry.local,) if scales is None else (entry.local, scales.local)
        conversions.append(
            _Conversion(
                signed=entry.path[2] != eight_bit.SECOND_MOMENT,
                read=tuple(other.local for other in found),
                wanted=targets,
            )
        )
        if scales is not None:
            del reading[scales.key]
        reading |= {other.key: other for other in found}
    return Reading(entries=list(reading.values()), _conversions=tuple(conversions))


def _saved(entry: Entry, *, codes_saved: bool) -> Collection[Entry]:
    """What the disk has of a moment, with memory to read it into."""
    if not codes_saved:
        return (replace(entry, local=torch.empty_like(entry.local, dtype=torch.float32)),)
    scales = _scales(entry)
    rows = entry.local.new_empty(len(entry.local), scales.shape[1], dtype=torch.float32)
    codes = torch.empty_like(entry.local, dtype=torch.uint8)
    return (replace(entry, local=codes), replace(scales, local=rows))


def _scales(entry: Entry) -> Entry:
    """The scales of a moment, as an entry without memory of its own."""
    path = (*entry.path[:2], eight_bit.scale_name(entry.path[2]))
    shape = torch.Size([entry.shape[0], eight_bit.num_blocks(entry.shape)]) if entry.shape else None
    return replace(entry, path=path, shape=shape or entry.shape)
