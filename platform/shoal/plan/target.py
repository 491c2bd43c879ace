"""Which machines a plan is made for, and how fast they are."""

from __future__ import annotations

from shoal.config import Config
from shoal.errors import ConfigError
from shoal.plan.machine import Machine
from shoal.plan.measure import measured_rates
from shoal.plan.precision import resolve_device
from shoal.plan.rates import GPUS, Rates, gpu_rates


def machine_and_rates(
    config: Config, *, gpu: str | None, measure: bool
) -> tuple[Machine, Rates | None]:
    """The workers' machine, and its rates as far as anybody said.

    Args:
        config: The run.
        gpu: A kind of GPU that every worker has; unset, workers are like this machine.
        measure: Whether to measure this machine's CPUs, which takes about a second.

    Raises:
        ConfigError: for an unknown kind, and where the run is on another device.
    """
    if gpu is not None:
        if measure or config.cluster.device == "cpu":
            problem = "--measure is of CPUs" if measure else "cluster.device is cpu"
            raise ConfigError("--gpu", gpu, problem, "Leave one of the two out")
        return Machine.with_gpus(), gpu_rates(gpu)
    machine = Machine.here()
    if not measure:
        return machine, None
    if resolve_device(config, machine) != "cpu":
        problem = "the workers run on GPUs, whose rates are known by their kind"
        raise ConfigError("--measure", True, problem, "Use --gpu KIND, or cluster.device: cpu")
    return machine, measured_rates(config)


def search_target(
    config: Config, *, gpu: str | None, measure: bool, memory_gib: float | None
) -> tuple[Machine, Rates, int]:
    """As ``machine_and_rates``, with the memory that a step may fill on each device.

    CPUs are measured in any case, since a search goes by time.

    Raises:
        ConfigError: also where the workers run on GPUs and nobody said of which kind.
    """
    on_cpus = gpu is None and resolve_device(config, Machine.here()) == "cpu"
    if gpu is None and not on_cpus:
        problem = "how fast the workers' GPUs are is not known"
        raise ConfigError("--gpu", None, problem, f"Name their kind: {', '.join(GPUS)}")
    machine, rates = machine_and_rates(config, gpu=gpu, measure=measure or on_cpus)
    assert rates is not None and rates.memory_bytes is not None
    if memory_gib is None:
        return machine, rates, rates.memory_bytes
    if not memory_gib > 0:
        raise ConfigError("--memory", memory_gib, "is no memory", "Give some GiB")
    return machine, rates, int(memory_gib * 2**30)
