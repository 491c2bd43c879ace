"""Nodes of a Ray cluster on this machine, which can be lost as machines are."""

from __future__ import annotations

import os
import re
import secrets
import signal
import sys
from pathlib import Path

from tests.e2e.shoal_process import MARK, MarkedProcess

RAY = str(Path(sys.executable).with_name("ray"))

SOON = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}
"""Has Ray notice within seconds, rather than half a minute, that a node is gone."""


class RayNode(MarkedProcess):
    """A node of its own ports and processes; the first one makes the cluster."""

    def __init__(
        self, folder: Path, *, num_cpus: int, head: RayNode | None = None, temp: Path | None = None
    ) -> None:
        """``temp``, a short path, is for what Ray keeps of the cluster that a head makes."""
        self.environment: dict[str, str]
        """What a command needs to use the cluster."""
        command = [RAY, "start", "--block", f"--num-cpus={num_cpus}", "--disable-usage-stats"]
        command += ["--min-worker-port=0", "--max-worker-port=0"]
        if head is None:
            token = secrets.token_hex(32)
            self.environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
            command += ["--head", "--port=0", f"--temp-dir={temp}", "--include-dashboard=false"]
        else:
            self.environment = head.environment
            command += [f"--address={head.environment['RAY_ADDRESS']}"]
        super().__init__(command, folder, **self.environment, **SOON)
        self.wait_for(lambda: "Ray runtime started" in self.output)
        if head is None:
            found = re.search(r"--address='([\d.]+:\d+)'", self.output)
            assert found is not None, self.output
            self.environment["RAY_ADDRESS"] = found[1]

    def lose(self) -> None:
        """Take the power away: every process of the node is gone at once."""
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if f"{MARK}={self.mark}".encode() in (folder / "environ").read_bytes():
                    os.kill(int(folder.name), signal.SIGKILL)
            except OSError:  # it ended meanwhile, or is another user's
                continue

    def __exit__(self, *exc: object) -> None:
        """Leave nothing running."""
        self.lose()
        super().__exit__(*exc)
