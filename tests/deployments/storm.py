"""Clients that leave at random moments; ``python -m tests.deployments.storm`` sends 1,000.

Behind HAProxy it then sends one that reads nothing, and sees that it is ended.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from tests.deployments.running import NAME, Running, shoal_serve, wait_until

NUM_CLIENTS = 1000
SPREAD_S = 2.0
"""Time over which the clients come."""
STAY_S = 0.5
"""Longest that one stays."""

WAYS: Mapping[str, Mapping[str, str]] = {
    "Serve's proxy": {},
    "HAProxy": {"RAY_SERVE_ENABLE_HA_PROXY": "1"},
}
"""Environment of each server that is stormed."""
ENDING_READERS = {"HAProxy"}
"""Where a client that reads nothing is ended; Serve's own proxy takes all that it is given."""

_SHAPES = [(stream, n) for stream in (False, True) for n in (1, 4)]


def storm(running: Running, num_clients: int, stay_s: float = STAY_S) -> None:
    """Have ``num_clients`` ask for long answers and leave after up to ``stay_s``."""
    asyncio.run(_storm(running.address, num_clients, stay_s))


async def _storm(address: str, num_clients: int, stay_s: float) -> None:
    await asyncio.gather(*(_client(address, number, stay_s) for number in range(num_clients)))


async def _client(address: str, number: int, stay_s: float) -> None:
    rng = random.Random(number)
    stream, n = _SHAPES[number % len(_SHAPES)]
    await asyncio.sleep(rng.uniform(0, SPREAD_S))
    host, _, port = address.partition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(request(stream=stream, n=n, prompt=f"client {number}", seed=number))
    await asyncio.sleep(rng.uniform(0, stay_s))
    if number % 3 == 0:  # with a reset, as a killed client's machine does
        end = writer.get_extra_info("socket")
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.close()


def request(**fields: object) -> bytes:
    """A completion request as it goes over the wire."""
    content = json.dumps({"model": NAME, "max_tokens": 900} | fields)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}"
    return f"{head}\r\nContent-Type: application/json\r\n\r\n{content}".encode()


def main() -> None:
    """Storm a server of two engines, behind each of Ray's proxies, and say how it took it."""
    for way, environment in WAYS.items():
        outcome = _stormed(environment, ends_readers=way in ENDING_READERS)
        sys.stdout.write(f"{way}: {outcome}\n")
        sys.stdout.flush()


def _stormed(environment: Mapping[str, str], *, ends_readers: bool) -> str:
    settings = ("serve.replicas=2", "serve.kv.tokens=65536", "serve.limits.write_timeout_s=1")
    with (
        tempfile.TemporaryDirectory() as folder,
        shoal_serve(Path(folder), *settings, environment=environment) as running,
    ):
        storm(running, NUM_CLIENTS)
        begin = time.monotonic()
        running.assert_idle(2.0)
        took = time.monotonic() - begin
        cancelled = sum(replica["cancelled"] for replica in running.replicas())
        assert running.http.get("/health").json()["status"] == "ok"
        assert running.complaints() == []
        if ends_readers:
            _read_nothing(running)
    return (
        f"{NUM_CLIENTS} clients left; idle {took:.2f} s after the last; "
        f"{cancelled} choices cancelled; no error logged"
        + ("; one that read nothing was ended" if ends_readers else "")
    )


def _read_nothing(running: Running) -> None:
    """Ask for more than all buffers on the way hold, read none of it, and be ended for that."""
    host, _, port = running.address.partition(":")
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        fields = {"stream": True, "n": 8, "max_tokens": 3900, "logprobs": 20}
        connection.sendall(request(prompt="more", ignore_eos=True, **fields))
        wait_until(lambda: any("read nothing" in line for line in running.complaints()), 60.0)
        running.assert_idle(2.0)


if __name__ == "__main__":
    main()
