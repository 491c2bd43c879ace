"""The HTTP port of a server on this machine: found free, and kept until Ray's proxy listens there.

Ray's proxies share a port with whoever allows it (SO_REUSEPORT), so two servers that start at a
time would both get it, and clients would reach now one, now the other.
"""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from shoal.errors import ConfigError

_FREE_PORTS = range(20_000, 32_000)


def free_port(host: str, port: int) -> int:
    """``port`` itself if nobody has it, or a free one for 0; ConfigError where there is none."""
    # Below those that the system hands out: Ray, which starts now, takes many of them.
    candidates = random.sample(_FREE_PORTS, len(_FREE_PORTS)) if port == 0 else [port]
    for candidate in candidates:
        try:
            with _socket(host) as listener:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind((host, candidate))
        except OSError as error:
            problem = f"no server can listen there on {host}: {error.strerror}"
            if error.errno == errno.EACCES:
                break
            if error.errno != errno.EADDRINUSE:
                raise ConfigError(
                    "serve.host",
                    host,
                    f"no server can listen there: {error.strerror}",
                    "Give an address of this machine, or 0.0.0.0 for all that it has",
                ) from error
        else:
            return candidate
    raise ConfigError("serve.port", port, problem, "Choose another, or 0 for a free one")


@contextmanager
def kept_port(host: str, port: int) -> Iterator[None]:
    """Within this block ``free_port`` refuses ``port``, and only those who share ports get it.

    Raises ConfigError where somebody has taken it since it was found free.
    """
    with _socket(host) as keeper:
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            # It never listens, so no connection ends here.
            keeper.bind((host, port))
        except OSError as error:
            problem = f"no server can listen there on {host}: {error.strerror}"
            remedy = "Choose another, or 0 for a free one"
            raise ConfigError("serve.port", port, problem, remedy) from error
        yield


def _socket(host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.socket(family, socket.SOCK_STREAM)
