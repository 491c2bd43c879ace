"""``shoal serve``: Ray, the application, and a terminal that says where it listens."""

from __future__ import annotations

import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ray import serve
from rich.console import Console

from shoal.config import ServeConfig
from shoal.errors import ConfigError, WorkError
from shoal.inference.loading import limits_of, served_tokenizer
from shoal_actors.train.cluster import open_cluster
from shoal_actors.train.console import divert_output
from shoal_actors.train.stop import Terminated, sigterm_raises
from shoal_deployments.application import build_application, num_cpus
from shoal_deployments.auth import ApiKeys

APP = "shoal"
_POLL_S = 1.0


def run(config: ServeConfig) -> int:
    """Serve until Ctrl-C or SIGTERM, and return 0.

    Raises ConfigError for what cannot work, before Ray is started; WorkError where an engine
    cannot be started or the application ends.
    """
    limits_of(config.folder, config.serve)
    served_tokenizer(config.folder)
    ApiKeys.read(config.serve.auth)
    port = _free_port(config.serve.host, config.serve.port)
    log = Path(tempfile.mkdtemp(prefix="shoal-serve-")) / "driver.log"
    # Being told to end is how serving ends well.
    with (
        suppress(KeyboardInterrupt, Terminated),
        sigterm_raises(),
        divert_output(log) as console,
        open_cluster(num_cpus=num_cpus(config)),
        sigterm_raises(),  # a second time: Ray's core has put a handler of its own in place
        _serving(config, port),
    ):
        _introduce(console, config, port)
        _watch()
    return 0


@contextmanager
def _serving(config: ServeConfig, port: int) -> Iterator[None]:
    """Serve inside this block."""
    try:
        serve.start(
            proxy_location="HeadOnly",
            http_options={"host": config.serve.host, "port": port},
        )
        try:
            serve.run(build_application(config), name=APP, route_prefix="/")
        except RuntimeError as error:
            raise WorkError(f"The application did not start: {_status() or error}") from error
        yield
    finally:
        serve.shutdown()


def _introduce(console: Console, config: ServeConfig, port: int) -> None:
    settings = config.serve
    lines = [
        f"{config.served_name}: engines: {settings.replicas}, frontends: {settings.num_frontends}",
        f"Ready at http://{settings.host}:{port}/v1  (Ctrl-C ends it)",
    ]
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _watch() -> None:
    """Return never: WorkError once the application has failed for good."""
    while True:
        time.sleep(_POLL_S)
        problem = _status()
        if problem:
            raise WorkError(f"The application failed: {problem}")


def _status() -> str:
    """What is wrong with the application; empty while it runs."""
    application = serve.status().applications.get(APP)
    if application is None:
        return "it is gone"
    if application.status.value != "DEPLOY_FAILED":
        return ""
    messages = [each.message for each in application.deployments.values() if each.message]
    return "; ".join(messages) or application.message


def _free_port(host: str, port: int) -> int:
    """``port`` itself if nobody listens there, or a free one for 0."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise ConfigError(
                "serve.port",
                port,
                f"no server can listen there on {host}: {error.strerror}",
                "Choose another port, or 0 for a free one",
            ) from error
        return int(listener.getsockname()[1])
