"""What serving is refused for before any process of it starts."""

from __future__ import annotations

import os
from dataclasses import dataclass

from shoal.config import ServeConfig, ServeSettings
from shoal.errors import ConfigError
from shoal.inference.limits import Limits
from shoal.inference.loading import end_of_text_ids, limits_of, served_tokenizer
from shoal.inference.pool import (
    PROCESS_BYTES,
    EngineSizes,
    Room,
    given_blocks,
    pool_blocks,
    whole_blocks,
)
from shoal.memory import available_bytes
from shoal.models import DecoderConfig, HFWeights, read_hf_config


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """The machine on which all engines and frontends are to run."""

    num_cpus: int
    """CPUs that this process may use."""

    free_bytes: int
    """Memory that it may still take."""

    @staticmethod
    def here() -> Host:
        """The machine that this process runs on."""
        return Host(num_cpus=len(os.sched_getaffinity(0)), free_bytes=available_bytes())

    def room(self, settings: ServeSettings) -> Room:
        """For all engines and frontends, none of which has started."""
        return Room(
            free_bytes=self.free_bytes,
            num_engines=settings.replicas,
            num_processes=settings.replicas + settings.num_frontends,
            num_pools=settings.replicas,
        )


def check_serving(config: ServeConfig, host: Host | None) -> tuple[Limits, EngineSizes]:
    """What each engine will be able to take and will keep, of what can be served.

    On ``host``, or where it is None on machines of which nothing is known. There each engine sizes
    a pool without ``serve.kv.tokens`` itself, and it counts with the most that it may have.

    Raises:
        ConfigError: for a folder without a supported model, settings that do not fit it, and more
            than ``host`` can bear.
        WorkError: for a damaged file of weights.
    """
    folder, settings = config.folder, config.serve
    HFWeights(folder)  # reads no more than names and shapes
    end_of_text_ids(folder, served_tokenizer(folder))
    decoder = DecoderConfig.from_hf(read_hf_config(folder))
    sizes = EngineSizes.of(decoder, settings)
    if host is not None:
        check_machine(settings, host.num_cpus, host.free_bytes)
        num_blocks = pool_blocks(decoder, settings, sizes, host.room(settings))
    elif (given := given_blocks(settings)) is not None:
        num_blocks = given
    else:
        num_blocks = whole_blocks(decoder, settings)
    return limits_of(decoder, settings, num_blocks), sizes


def check_machine(settings: ServeSettings, num_cpus: int, free_bytes: int) -> None:
    """Refuse what this machine, on which all processes are to run, cannot bear: ConfigError."""
    if settings.threads > num_cpus:
        raise ConfigError(
            "serve.threads",
            settings.threads,
            f"this machine has {num_cpus} CPUs",
            f"Use at most {num_cpus}",
        )
    count, most = settings.replicas + settings.num_frontends, free_bytes // PROCESS_BYTES
    if count > most:
        by_replicas = settings.frontends is None
        raise ConfigError(
            "serve.replicas" if by_replicas else "serve.frontends",
            settings.replicas if by_replicas else settings.frontends,
            f"{settings.replicas} engines and {settings.num_frontends} frontends are {count} "
            f"processes, and {free_bytes:,} bytes are free",
            f"Use {most} at most, engines and frontends together",
        )
