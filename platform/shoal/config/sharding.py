"""Where parameters, gradients and optimizer state live."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from shoal.config.section import Section


class Level(StrEnum):
    """What one data-parallel axis shards; each level includes the ones before it."""

    REPLICATE = "replicate"
    """Nothing (DDP)."""
    OPTIMIZER = "optimizer"
    """Optimizer state (ZeRO-1)."""
    GRADIENTS = "gradients"
    """Gradients too (ZeRO-2)."""
    PARAMETERS = "parameters"
    """Parameters too (ZeRO-3)."""


class AxisLevels(Section):
    """The level of each data-parallel axis for one kind of layer."""

    outer: Level = Field(default=Level.REPLICATE, strict=False)
    """Across NVLink domains."""

    inner: Level = Field(default=Level.PARAMETERS, strict=False)
    """Inside one NVLink domain."""


class ShardingSettings(Section):
    """``sharding``: levels of dense and of expert layers, apart."""

    dense: AxisLevels = AxisLevels()
    """Every layer but the experts."""

    expert: AxisLevels = AxisLevels()
    """The experts of mixture-of-experts layers."""
