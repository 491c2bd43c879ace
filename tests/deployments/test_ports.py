"""A port belongs to one server from the moment it was found free."""

from __future__ import annotations

import socket

import pytest

from shoal.errors import ConfigError
from shoal_deployments.ports import free_port, kept_port

HOST = "127.0.0.1"


def _listening(port: int) -> socket.socket:
    """A listener that shares its port, as Ray's proxies do."""
    proxy = socket.socket()
    proxy.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    proxy.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    proxy.bind((HOST, port))
    proxy.listen()
    return proxy


def test_a_server_that_starts_has_its_port_to_itself() -> None:
    port = free_port(HOST, 0)
    with kept_port(HOST, port):
        with pytest.raises(ConfigError, match=rf"serve\.port = {port}: no server can listen"):
            free_port(HOST, port)
        with _listening(port):
            with socket.create_connection((HOST, port), 5):
                pass
    assert free_port(HOST, port) == port


def test_a_port_that_was_taken_meanwhile_is_refused() -> None:
    with socket.socket() as other:
        other.bind((HOST, 0))
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"serve\.port = {port}"), kept_port(HOST, port):
            raise AssertionError("it is another's")


def test_a_port_of_a_server_that_has_just_ended_is_free() -> None:
    """Its connections linger for a while (TIME_WAIT)."""
    port = free_port(HOST, 0)
    with _listening(port) as proxy:
        client = socket.create_connection((HOST, port), 5)
        proxy.accept()[0].close()
        client.close()
    assert free_port(HOST, port) == port
    with kept_port(HOST, port):
        pass


@pytest.mark.parametrize("host", ["192.0.2.1", "::ffff"])
def test_a_host_that_is_not_this_machine_is_refused_as_such(host: str) -> None:
    with pytest.raises(ConfigError, match=r"serve\.host = .*no server can listen there"):
        free_port(host, 0)
