"""What a comparison of saves and loads found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Seconds, each measured once in the same round."""

    loop_s: float
    """Some training steps."""

    loop_with_save_s: float
    """As many, with a save begun before the first."""

    stall_s: float
    """How long that save held the first rank's loop up: its beginning, and the wait for the copy
    before the optimizer's next step."""

    write_s: float
    """A save from its beginning until it is published, while the ranks do nothing else."""

    plain_s: float
    """One process writes as many bytes to one file and flushes it."""

    load_s: float
    """A load of that save, checksums included."""

    dcp_save_s: float
    """``torch.distributed.checkpoint.save`` of the same tensors."""

    dcp_load_s: float
    """``torch.distributed.checkpoint.load`` of that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointReport:
    """All rounds of one run; ratios are taken within a round, and the median over all."""

    num_bytes: int
    """Of one checkpoint."""

    ranks: int

    rounds: tuple[Round, ...]

    @property
    def stall(self) -> float:
        """Stall of the loop by a save, over a save by DCP that it waits for."""
        return self._median(lambda r: r.stall_s / r.dcp_save_s)

    @property
    def lengthening(self) -> float:
        """By how much a save made the loop longer, its writing included, over a save by DCP."""
        return self._median(lambda r: (r.loop_with_save_s - r.loop_s) / r.dcp_save_s)

    @property
    def write(self) -> float:
        """Speed of a save over that of a plain write."""
        return self._median(lambda r: r.plain_s / r.write_s)

    @property
    def load(self) -> float:
        """Speed of a load over that of DCP's."""
        return self._median(lambda r: r.dcp_load_s / r.load_s)

    def _median(self, figure: Callable[[Round], float]) -> float:
        return median(figure(each) for each in self.rounds)

    def json(self) -> dict[str, Any]:
        """Plain values, with every round."""
        ratios = {
            "stall": self.stall,
            "lengthening": self.lengthening,
            "write": self.write,
            "load": self.load,
        }
        return asdict(self) | {"ratios": ratios}

    def text(self) -> str:
        """Lines for people."""

        def ms(figure: Callable[[Round], float]) -> str:
            return f"{1e3 * self._median(figure):,.0f} ms"

        return "\n".join(
            [
                f"{self.num_bytes / 1e6:.0f} MB on {self.ranks} ranks of one thread, "
                f"median of {len(self.rounds)} rounds",
                "",
                f"loop held up by a save   {ms(lambda r: r.stall_s)}; a save by DCP "
                f"{ms(lambda r: r.dcp_save_s)}: {self.stall:.3f} of it",
                f"loop longer by a save    {ms(lambda r: r.loop_with_save_s - r.loop_s)}, the "
                f"cores that writing takes included: {self.lengthening:.3f} of it",
                f"save until published     {ms(lambda r: r.write_s)}; a plain write "
                f"{ms(lambda r: r.plain_s)}: {self.write:.2f} of its speed",
                f"load                     {ms(lambda r: r.load_s)}; DCP's "
                f"{ms(lambda r: r.dcp_load_s)}: {self.load:.2f} of its speed",
            ]
        )
