"""The engine alone and real clients of ``shoal serve``, in one run and in turns.

    driver ──┬── alone      the engine in a process of its own, with the server's settings
             ├── client     reads streams over HTTP
             ├── stranger   a second one, that sends a long prompt
             └── server     shoal serve: once for each way of serving

All have the same weights and share the machine's cores, as they would. A ratio is taken within a
round, in which both get the same prompts, one after the other.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shoal.bench.random_model import write_random_model
from shoal.bench.worker import Worker, worker
from shoal.config import AuthSettings, ServeConfig, load_serve_config
from shoal.errors import ConfigError, ConfigErrors, WorkError
from shoal.inference.forward.precision import resolved_precision
from shoal.models import DecoderConfig, parameter_shapes
from shoal_deployments.bench.report import FirstTokens, Pauses, ServeCase, ServeReport
from shoal_deployments.bench.server import serving
from shoal_deployments.bench.setup import ServeBenchSetup
from shoal_deployments.bench.words import text_of, write_words

_UNDER_WAY_S = 0.5
"""After which a stream has begun."""


def bench_serve(
    *, overrides: tuple[str, ...] = (), setup: ServeBenchSetup | None = None
) -> ServeReport:
    """Time the engine alone and over HTTP, both with ``overrides``; takes some minutes.

    Raises ConfigError for settings that do not fit, WorkError where a process fails.
    """
    setup = setup or ServeBenchSetup()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        model = folder / "bench"
        model.mkdir()
        config = load_serve_config(model, overrides)
        _refuse_keys(config.serve.auth)
        decoder = DecoderConfig.from_hf(setup.model)
        write_random_model(model, decoder)
        write_words(model, decoder.vocab_size)
        alone = [sys.executable, "-m", "shoal_deployments.bench.alone", str(model)]
        client = [sys.executable, str(Path(__file__).parent / "client.py")]
        bench = _Bench(
            setup=setup,
            config=config,
            vocab_size=decoder.vocab_size,
            alone=stack.enter_context(worker("engine", [*alone, *overrides], folder / "alone.log")),
            client=stack.enter_context(worker("client", client, folder / "client.log")),
            stranger=stack.enter_context(worker("client", client, folder / "stranger.log")),
        )
        cases: list[ServeCase] = []
        firsts: list[FirstTokens] = []
        pauses: list[Pauses] = []
        for way, environment in setup.ways.items():
            with serving(model, overrides, environment, folder / "server.log") as address:
                cases += bench.cases(way, address)
                firsts.append(bench.first_tokens(way, address))
                pauses.append(bench.pauses(way, address))
    return ServeReport(
        model=_description(decoder, config, setup),
        cases=tuple(cases),
        first_tokens=tuple(firsts),
        pauses=tuple(pauses),
    )


def _refuse_keys(auth: AuthSettings) -> None:
    problem, remedy = "the clients of this benchmark send no key", "Leave it out"
    ConfigErrors.raise_any(
        [
            ConfigError(f"serve.auth.{name}", value, problem, remedy)
            for name, value in auth
            if value is not None
        ]
    )


def _description(decoder: DecoderConfig, config: ServeConfig, setup: ServeBenchSetup) -> str:
    millions = sum(math.prod(shape) for shape in parameter_shapes(decoder).values()) / 1e6
    return (
        f"{setup.model['model_type']} of {millions:.0f}M random parameters, "
        f"{resolved_precision(config.serve.precision)}, greedy; engine threads: "
        f"{config.serve.threads}, alone and served; cores of all together: "
        f"{len(os.sched_getaffinity(0))}; prompts of {setup.prompt_tokens} tokens, answers of "
        f"{setup.new_tokens}; median of {setup.rounds} rounds"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bench:
    setup: ServeBenchSetup
    config: ServeConfig
    vocab_size: int
    alone: Worker
    client: Worker
    stranger: Worker

    def cases(self, way: str, address: str) -> Iterator[ServeCase]:
        """Whole answers, for each number of streams."""
        new_tokens = self.setup.new_tokens
        for streams in self.setup.streams:
            alone_s, http_s = [], []
            for number in range(self.setup.rounds + 1):
                prompts = self._prompts(streams, number)
                alone = self.alone.ask(prompts=prompts, new_tokens=new_tokens)
                http = self._http(address, prompts, new_tokens)
                alone_s.append(float(alone["seconds"]))
                http_s.append(float(http["seconds"]))
            yield ServeCase(
                way=way,
                streams=streams,
                new_tokens=new_tokens,
                alone_s=tuple(alone_s[1:]),
                http_s=tuple(http_s[1:]),
            )

    def first_tokens(self, way: str, address: str) -> FirstTokens:
        """Requests of one token, one after the other."""
        alone_s, http_s = [], []
        for number in range(self.setup.first_tokens + 1):
            prompts = self._prompts(1, 1_000 + number)
            alone = self.alone.ask(prompts=prompts, new_tokens=1)
            http = self._http(address, prompts, 1)
            alone_s.append(float(alone["first_s"][0]))
            http_s.append(float(http["streams"][0]["first_s"]))
        return FirstTokens(way=way, alone_s=tuple(alone_s[1:]), http_s=tuple(http_s[1:]))

    def pauses(self, way: str, address: str) -> Pauses:
        """One stream, by itself and while another client's long prompt is tokenized."""
        setup = self.setup
        text = text_of(setup.long_prompt_tokens)
        alone_s, beside_s = [], []
        for number in range(setup.rounds):
            prompts = self._prompts(1, 2_000 + number)
            alone = self._http(address, prompts, setup.stream_tokens)
            name = self.config.served_name
            self.stranger.tell(
                address=address, model=name, prompts=[text], new_tokens=1, delay_s=_UNDER_WAY_S
            )
            beside = self._http(address, prompts, setup.stream_tokens)
            refused = self.stranger.answer()["streams"][0]["status"]
            if refused != 400:  # the model's context is shorter, as the tokenizer has found out
                raise WorkError(f"The long prompt was answered with status {refused}.")
            alone_s.append(float(alone["streams"][0]["pause_s"]))
            beside_s.append(float(beside["streams"][0]["pause_s"]))
        return Pauses(
            way=way,
            prompt_tokens=setup.long_prompt_tokens,
            alone_s=tuple(alone_s),
            beside_s=tuple(beside_s),
        )

    def _http(self, address: str, prompts: list[list[int]], new_tokens: int) -> Any:
        """What the client saw; WorkError unless every stream was complete."""
        answer = self.client.ask(
            address=address,
            model=self.config.served_name,
            prompts=prompts,
            new_tokens=new_tokens,
            delay_s=0.0,
        )
        for stream in answer["streams"]:
            if stream["tokens"] != new_tokens:
                raise WorkError(f"A stream of {new_tokens} tokens came as {stream}.")
        return answer

    def _prompts(self, count: int, number: int) -> list[list[int]]:
        generator = np.random.Generator(np.random.Philox(number))
        shape = (count, self.setup.prompt_tokens)
        # Beyond the single bytes, so that each token is a text of its own.
        prompts: list[list[int]] = generator.integers(258, self.vocab_size, shape).tolist()
        return prompts
