"""``shoal serve`` as users start it, and what the engine itself answers to the same requests."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
import torch

from shoal.config import ServeSettings
from shoal.inference import Request, SamplingParams
from shoal.inference.engine import Engine
from shoal.inference.loading import load_engine
from shoal.inference.offline import Answer, joined, stream
from shoal.models import DecoderConfig, parameter_shapes, write_hf_folder
from tests.e2e.shoal_process import ShoalProcess
from tests.models.tiny import TINY

NAME = "tiny-llama"
DEADLINE_S = 60.0


def write_model(folder: Path, **changes: Any) -> Path:
    """A model of random weights that talks at length; its tokens are bytes."""
    config = DecoderConfig.from_hf({**TINY["smollm2"], "max_position_embeddings": 4096, **changes})
    generator = torch.Generator().manual_seed(7)
    tensors = {
        name: 0.2 * torch.randn(shape, generator=generator)
        for name, shape in parameter_shapes(config).items()
    }
    write_hf_folder(folder, config, tensors.items())
    return folder


class Running:
    """A server on this machine and clients of it."""

    def __init__(self, process: ShoalProcess, url: str, model: Path) -> None:
        self.process = process
        self.url = url
        self.address = url.removeprefix("http://")
        self.model = model
        self.http = httpx2.Client(base_url=url, timeout=DEADLINE_S)
        self._sdk = openai.OpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S
        )
        self._engine: Engine | None = None
        logs = re.search(r"Logs are in (.*)", process.output)
        assert logs is not None
        self._logs = Path(logs[1])

    @property
    def sdk(self) -> openai.OpenAI:
        """The official client, without its own retries."""
        return self._sdk

    def complete(self, **fields: Any) -> httpx2.Response:
        """POST a small completion with ``fields`` on top."""
        body = {"model": NAME, "prompt": "Hi", "max_tokens": 8} | fields
        return self.http.post("/v1/completions", json=body)

    def replicas(self) -> list[dict[str, Any]]:
        """``/stats`` of each engine that answers."""
        return list(self.http.get("/stats").json()["replicas"])

    def direct(self, prompt: bytes, **params: Any) -> list[Answer]:
        """What an engine in this process answers."""
        if self._engine is None:
            self._engine = load_engine(self.model, ServeSettings())
        request = Request(id="direct", prompt=tuple(prompt), params=SamplingParams(**params))
        return joined(list(stream(self._engine, request)))

    def assert_idle(self, within_s: float = 2.0) -> None:
        """Assert that nothing runs, nothing waits, and all blocks are free."""
        wait_until(lambda: all(map(_is_idle, self.replicas())), within_s)

    def complaints(self) -> list[str]:
        """What the frontends and engines logged beyond one line for each request."""
        return [
            line
            for line in self._log_lines()
            if " ERROR " in line or " WARNING " in line or "Error" in line
        ]

    def completions(self) -> Counter[tuple[int, float]]:
        """Status and seconds of each completion so far, as the frontends have it in their logs."""
        form = re.compile(r"POST /v1/completions (\d+) ([\d.]+) s$")
        found = filter(None, map(form.search, self._log_lines()))
        return Counter((int(line[1]), float(line[2])) for line in found)

    def _log_lines(self) -> Iterator[str]:
        """What all frontends and engines have logged."""
        for log in self._logs.rglob("worker-*.err"):
            text = log.read_text()
            if "EngineActor" in text or "ServeReplica" in text:
                yield from text.splitlines()

    def close(self) -> None:
        """Close the clients."""
        self.http.close()
        self._sdk.close()


def _is_idle(stats: dict[str, Any]) -> bool:
    used = stats["kv_blocks_total"] - stats["kv_blocks_free"]
    return not any((stats["running"], stats["waiting"], used))


def wait_until(holds: Callable[[], bool], within_s: float) -> None:
    """Wait for ``holds()``; AssertionError after ``within_s``."""
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, "it did not come to hold"
        time.sleep(0.05)


@contextmanager
def shoal_serve(
    folder: Path,
    *overrides: str,
    environment: Mapping[str, str] | None = None,
    **changes: Any,
) -> Iterator[Running]:
    """``shoal serve`` until the end of the block; ``changes`` are laid over the model's config."""
    model = write_model(folder / NAME, **changes)
    arguments = ["serve", str(model), "--set", "serve.port=0"]
    for override in overrides:
        arguments += ["--set", override]
    more = {"OMP_NUM_THREADS": "1", **(environment or {})}
    with ShoalProcess(arguments, folder, **more) as process:
        ready = re.compile(r"Ready at (http://[\d.:]+)/v1")
        process.wait_for(lambda: ready.search(process.output) is not None)
        found = ready.search(process.output)
        assert found is not None
        running = Running(process, found[1], model)
        try:
            yield running
        finally:
            running.close()
            process.interrupt()
            assert process.wait() == 0, process.output
            assert process.left_running() == []


def engine_pids(running: Running) -> list[int]:
    """Processes of the engines under this server."""
    return _pids(running, "ray::EngineActor")


def frontend_pids(running: Running) -> list[int]:
    """Processes of its frontends."""
    return _pids(running, "ray::ServeReplica")


def _pids(running: Running, prefix: str) -> list[int]:
    """Processes under this server with a name, which Ray sets, that begins like this."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name = (folder / "cmdline").read_bytes()
            mine = running.process.mark.encode() in (folder / "environ").read_bytes()
        except OSError:  # it ended meanwhile, or is another user's
            continue
        if name.startswith(prefix.encode()) and mine:
            found.append(int(folder.name))
    return sorted(found)
