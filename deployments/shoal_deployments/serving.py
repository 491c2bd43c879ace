"""``shoal serve``: Ray, the application, and a terminal that says where it listens."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview
from rich.console import Console

from shoal.config import ServeConfig
from shoal.errors import WorkError
from shoal.inference.journal import journal_folder
from shoal.inference.refusals import Host, check_serving
from shoal_actors.driver import (
    Cluster,
    Terminated,
    divert_output,
    is_elsewhere,
    open_cluster,
    termination_raises,
)
from shoal_deployments.application import build_application
from shoal_deployments.auth import ApiKeys
from shoal_deployments.checks import check_places, check_unserved
from shoal_deployments.ports import free_port, kept_port

APP = "shoal"
_POLL_S = 1.0
_DRAIN_POLL_S = 0.1
_DRAIN_SILENCE_S = 1.5
"""How long ending may take before the user is told what it waits for."""
_DRAIN_SLACK_S = 10.0
"""What Serve may need, beside the requests' own time, to end an application."""
_WAITING = (
    "Waiting for the engines, which load the model and test their kernels; the first start on a "
    "machine also compiles them, which can take a minute"
)
_AS_IT_IS = (
    "Note: model.path is served as it is; what the run of this file trains is served from the "
    "folder that shoal export writes"
)
_LOST = "An engine or a frontend is lost; another is started in its place (/health says which)"
_WHOLE = "All engines and frontends are there again"


def run(config: ServeConfig, *, also_trains: bool = False) -> int:
    """Serve until Ctrl-C, SIGTERM or SIGHUP, and return 0.

    ``also_trains`` says that the file describes a run too, whose result is not what is served.
    Requests under way have ``serve.drain_timeout_s`` to end; a second signal cuts them off.
    Raises ConfigError for what cannot work, before Ray is started; WorkError where an engine
    cannot be started or the application ends.
    """
    machine = None if is_elsewhere() else Host.here()
    limits, _ = check_serving(config, machine)
    # Decided once, before any engine takes memory, where all of them will share this machine.
    num_blocks = None if machine is None else limits.num_blocks
    ApiKeys.read(config.serve.auth)
    if config.serve.journal.dir is not None:
        for place in range(config.serve.replicas):
            journal_folder(config.serve.journal, place)
    port = free_port(config.serve.host, config.serve.port)
    # Being told to end is how serving ends well.
    with (
        suppress(KeyboardInterrupt, Terminated),
        termination_raises(),
        tempfile.TemporaryDirectory(prefix="shoal-serve-") as folder,
        divert_output(Path(folder) / "driver.log") as console,
    ):
        settings = config.serve
        counts = f"engines: {settings.replicas}, frontends: {settings.num_frontends}"
        _say(console, f"{config.served_name}: {counts}")
        if also_trains:
            _say(console, _AS_IT_IS)
        with (
            kept_port(settings.host, port) if _shares_port() else nullcontext(),
            open_cluster(num_cpus=settings.num_cpus) as cluster,
            termination_raises(),  # a second time: Ray's core has put a handler of its own in place
            _serving(config, num_blocks, port, cluster, console),
        ):
            _say(console, ready_line(settings.host, port))
            try:
                _watch(console)
            except KeyboardInterrupt:
                _drain(settings.drain_timeout_s, console)
                raise
    return 0


@contextmanager
def _serving(
    config: ServeConfig, num_blocks: int | None, port: int, cluster: Cluster, console: Console
) -> Iterator[None]:
    """Serve inside this block."""
    check_places(config, cluster)
    check_unserved(cluster)
    _say(console, f"Logs are in {ray._private.worker.global_worker.node.get_logs_dir_path()}")
    _say(console, _WAITING)
    try:
        try:
            serve.start(
                proxy_location="HeadOnly",
                http_options={"host": config.serve.host, "port": port},
            )
            serve.run(build_application(config, num_blocks), name=APP, route_prefix="/")
        except (RuntimeError, RayError) as error:  # what an actor of Serve raised, or its death
            last_line = str(error).strip().splitlines()[-1]
            application = serve.status().applications.get(APP)
            problem = (application and _problem(application)) or last_line
            raise WorkError(f"The application did not start: {problem}") from None
        yield
    finally:
        serve.shutdown()


def ready_line(host: str, port: int) -> str:
    """What is printed once requests are answered; other programs read the address in it."""
    shown = f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{port}"
    return f"Ready at {url}/v1, with a console at {url}/  (Ctrl-C ends it)"


def _say(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def _shares_port() -> bool:
    """Whether the proxy is Ray's own, on this machine: HAProxy needs its port for itself."""
    return not is_elsewhere() and os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") != "1"


def _watch(console: Console) -> None:
    """Say what is lost and comes back; WorkError once the application has failed for good."""
    was_whole = True
    while True:
        time.sleep(_POLL_S)
        application = serve.status().applications.get(APP)
        problem = _problem(application) if application else "it is gone"
        if problem:
            raise WorkError(f"The application failed: {problem}")
        is_whole = application.status is not ApplicationStatus.UNHEALTHY
        if is_whole != was_whole:
            _say(console, _WHOLE if is_whole else _LOST)
        was_whole = is_whole


def _drain(timeout_s: float, console: Console) -> None:
    """Take no more requests, and return once those under way have ended or their time is over.

    Serve ends the frontends by ``drain_timeout_s`` itself, and the engines once no frontend is
    left.
    """
    serve.delete(APP, _blocking=False)
    begun, is_said = time.monotonic(), False
    while serve.status().applications.get(APP) is not None:
        waited_s = time.monotonic() - begun
        if waited_s > timeout_s + _DRAIN_SLACK_S:
            return
        if waited_s > _DRAIN_SILENCE_S and not is_said:
            _say(
                console,
                f"Ending, once the requests under way have their answers or {timeout_s:g} s are "
                "over; Ctrl-C again ends them now",
            )
            is_said = True
        time.sleep(_DRAIN_POLL_S)


def _problem(application: ApplicationStatusOverview) -> str:
    """Why the application has failed; empty while it has not."""
    if application.status is not ApplicationStatus.DEPLOY_FAILED:
        return ""
    messages = [each.message for each in application.deployments.values() if each.message]
    lines = (messages or [application.message])[0].strip().splitlines()
    # What lies between is Ray's traceback, which its logs have too.
    return lines[0] if len(lines) == 1 else f"{lines[0].strip()} … {lines[-1].strip()}"
