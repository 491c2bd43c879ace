"""How fast machines compute and talk: what a step's time is estimated from.

Figures of GPUs are those of the vendor's datasheets, dense (without structured sparsity), a link's
in one direction for one GPU. ``outside`` is the network that the vendor's own system has for each
GPU. Programs attain a part of them, which is assumed, the same for all kinds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import ceil, log2
from types import MappingProxyType
from typing import Any

import torch

from shoal.errors import ConfigError

ATTAINED_FLOPS = 0.6
"""Share of its rate at which large matrix products run."""

ATTAINED_LINK = 0.8
"""Share of its rate at which a link carries large collectives."""

USABLE_MEMORY = 0.9
"""Share of a GPU's memory that a step may fill; the rest is for the driver, the libraries and the
allocator's gaps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One class of links."""

    bytes_per_s: float
    """That one rank sends, while it receives as many."""

    latency_s: float
    """Of each hop; an assumption, since datasheets have none."""

    def seconds(self, num_bytes: int, count: int, group_size: int) -> float:
        """Time of ``count`` collectives that send ``num_bytes`` together, as a tree of hops."""
        hops = max(ceil(log2(group_size)), 1) if group_size > 1 else 0
        return num_bytes / self.bytes_per_s + count * hops * self.latency_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """One kind of machine."""

    name: str

    flops: Mapping[torch.dtype, float]
    """Floating-point operations a second in matrix products, by format, as they are attained."""

    memory_bytes_per_s: float
    """Between a device and its own memory."""

    inside: Link
    """Within a domain of fast links."""
    outside: Link
    """Between domains."""

    domain: int | None
    """Most ranks that a domain of fast links has; None where that is up to the cluster."""

    memory_bytes: int | None
    """Memory that a step may fill on each device; None where nobody said."""

    source: str
    """Where the figures come from."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "name": self.name,
            "flops": {str(dtype).removeprefix("torch."): x for dtype, x in self.flops.items()},
            "memory_bytes_per_s": self.memory_bytes_per_s,
            "inside": asdict(self.inside),
            "outside": asdict(self.outside),
            "domain": self.domain,
            "memory_bytes": self.memory_bytes,
            "source": self.source,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sheet:
    """A datasheet's figures of one GPU, in its units."""

    bf16_tflops: float
    fp32_tflops: float
    memory_gb: float
    memory_tb_per_s: float
    inside_gb_per_s: float
    outside_gb_per_s: float
    domain: int
    source: str


_SHEETS = {
    "A100": _Sheet(
        bf16_tflops=312,
        fp32_tflops=19.5,
        memory_gb=80,
        memory_tb_per_s=2.039,
        inside_gb_per_s=300,
        outside_gb_per_s=25,
        domain=8,
        source="NVIDIA A100 80GB SXM datasheet; DGX A100 datasheet (200 Gb/s a GPU)",
    ),
    "H100": _Sheet(
        bf16_tflops=989.5,
        fp32_tflops=67,
        memory_gb=80,
        memory_tb_per_s=3.35,
        inside_gb_per_s=450,
        outside_gb_per_s=50,
        domain=8,
        source="NVIDIA H100 SXM datasheet; DGX H100 datasheet (400 Gb/s a GPU)",
    ),
    "H200": _Sheet(
        bf16_tflops=989.5,
        fp32_tflops=67,
        memory_gb=141,
        memory_tb_per_s=4.8,
        inside_gb_per_s=450,
        outside_gb_per_s=50,
        domain=8,
        source="NVIDIA H200 SXM datasheet; DGX H200 datasheet (400 Gb/s a GPU)",
    ),
    "B200": _Sheet(
        bf16_tflops=2250,
        fp32_tflops=75,
        memory_gb=180,
        memory_tb_per_s=8,
        inside_gb_per_s=900,
        outside_gb_per_s=50,
        domain=8,
        source="NVIDIA HGX B200 datasheet; DGX B200 datasheet (400 Gb/s a GPU)",
    ),
    "GB200": _Sheet(
        bf16_tflops=2500,
        fp32_tflops=80,
        memory_gb=186,
        memory_tb_per_s=8,
        inside_gb_per_s=900,
        outside_gb_per_s=50,
        domain=72,
        source="NVIDIA GB200 NVL72 datasheet (400 Gb/s a GPU)",
    ),
}

GPUS = tuple(_SHEETS)
"""Kinds whose rates are known."""


def gpu_rates(kind: str) -> Rates:
    """What a kind of GPU attains; ``ConfigError`` for one that is not known."""
    sheet = _SHEETS.get(kind.upper())
    if sheet is None:
        problem = "no datasheet of this kind is at hand"
        raise ConfigError("--gpu", kind, problem, f"Use one of {', '.join(GPUS)}")
    flops = {torch.bfloat16: sheet.bf16_tflops, torch.float32: sheet.fp32_tflops}
    return Rates(
        name=kind.upper(),
        flops=MappingProxyType({key: 1e12 * ATTAINED_FLOPS * x for key, x in flops.items()}),
        memory_bytes_per_s=1e12 * ATTAINED_LINK * sheet.memory_tb_per_s,
        inside=Link(bytes_per_s=1e9 * ATTAINED_LINK * sheet.inside_gb_per_s, latency_s=5e-6),
        outside=Link(bytes_per_s=1e9 * ATTAINED_LINK * sheet.outside_gb_per_s, latency_s=15e-6),
        domain=sheet.domain,
        memory_bytes=int(1e9 * USABLE_MEMORY * sheet.memory_gb),
        source=f"{sheet.source}; {ATTAINED_FLOPS:.0%} of its FLOP rate and {ATTAINED_LINK:.0%} of "
        "its links and memory assumed to be attained",
    )
