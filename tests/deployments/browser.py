"""A headless Chromium, driven over a pair of pipes by Chrome's DevTools protocol.

    test ── {"id", "method", "params"} NUL ──> file 3   chromium --remote-debugging-pipe
         <─ {"id", "result"} NUL ───────────── file 4
         <─ {"method", "params"} NUL ─────────          events, kept for whoever asks later

The protocol is Chromium's own, so nothing has to be installed beside it.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
DEADLINE_S = 60.0

_KEYS = {"Enter": 13, "Escape": 27, "Tab": 9, " ": 32}


def executable() -> str:
    """Where Chromium is; skips the test where there is none.

    The environment variable SHOAL_BROWSER names it, and then it has to be there.
    """
    wanted = os.environ.get("SHOAL_BROWSER")
    found = [wanted] if wanted else [path for path in map(shutil.which, NAMES) if path]
    if not found:
        pytest.skip(
            "There is no Chromium here: apt-get install chromium-headless-shell, or name a browser "
            "by the environment variable SHOAL_BROWSER."
        )
    return found[0]


class Page:
    """One tab, in a profile of its own: no cookies, storage or cache of another's."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self._context = browser.call("Target.createBrowserContext")["browserContextId"]
        target = browser.call(
            "Target.createTarget", url="about:blank", browserContextId=self._context
        )
        attached = browser.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a method of the protocol."""
        return self._browser.call(method, self._session, **params)

    def close(self) -> None:
        """Close the tab and forget its profile."""
        self._browser.call("Target.disposeBrowserContext", browserContextId=self._context)

    def goto(self, url: str) -> None:
        """Load ``url`` to its end."""
        self.call("Page.navigate", url=url)
        self.wait_for(f"location.href.startsWith({json.dumps(url)})")
        self.wait_for("document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited; AssertionError where it throws."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, expression: str, within_s: float = DEADLINE_S) -> Any:
        """The first value of ``expression`` that holds."""
        deadline = time.monotonic() + within_s
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < deadline, f"did not come to hold: {expression}"
            time.sleep(0.03)
        return value

    def text(self, selector: str) -> str:
        """What the first element that matches says."""
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)}).textContent"))

    def wait_for_text(self, selector: str, text: str) -> None:
        """Wait until some element that matches contains ``text``."""
        self.wait_for(
            f"[...document.querySelectorAll({json.dumps(selector)})]"
            f".some((each) => each.textContent.includes({json.dumps(text)}))"
        )

    def is_shown(self, selector: str) -> bool:
        """Whether the first element that matches takes up room."""
        found = f"document.querySelector({json.dumps(selector)})"
        return bool(self.evaluate(f"{found} !== null && {found}.getClientRects().length > 0"))

    def click(self, selector: str) -> None:
        """Press the left button on the last element that matches; it must not be covered."""
        x, y, is_free = self.evaluate(
            f"""(() => {{
              const found = [...document.querySelectorAll({json.dumps(selector)})].at(-1);
              found.scrollIntoView({{ block: "nearest", behavior: "instant" }});
              const box = found.getBoundingClientRect();
              const [x, y] = [box.x + box.width / 2, box.y + box.height / 2];
              return [x, y, found.contains(document.elementFromPoint(x, y))];
            }})()"""
        )
        assert is_free, f"{selector} is covered or off the screen"
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def fill(self, selector: str, text: str) -> None:
        """Replace what a field holds, as by typing."""
        self.evaluate(f"document.querySelector({json.dumps(selector)}).select()")
        if text:
            self.call("Input.insertText", text=text)
        else:
            self.evaluate(f"document.querySelector({json.dumps(selector)}).value = ''")

    def type(self, text: str) -> None:
        """Type into whatever has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False) -> None:
        """Press and release a key that is no letter."""
        common: dict[str, Any] = {
            "key": key,
            "code": key,
            "windowsVirtualKeyCode": _KEYS[key],
            "modifiers": 8 if shift else 0,
        }
        written = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **common, **written)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def show(self, width: int, height: int, scheme: str = "light") -> None:
        """Set the window's size and whether the reader prefers ``light`` or ``dark``."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def screenshot(self, path: Path) -> None:
        """Write what the window shows as a PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def controls(self) -> list[tuple[str, str]]:
        """(role, name) of everything that can be operated, as assistive technology is told it."""
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        roles = ("button", "textbox", "spinbutton", "checkbox", "link", "DisclosureTriangle")
        return [
            (node["role"]["value"], node.get("name", {}).get("value", ""))
            for node in nodes
            if not node["ignored"] and node["role"]["value"] in roles
        ]

    def events(self, method: str) -> list[dict[str, Any]]:
        """Parameters of the events of that name so far."""
        self.evaluate("0")  # events that came before it have been read then
        return [
            event["params"]
            for event in self._browser.events
            if event.get("sessionId") == self._session and event["method"] == method
        ]

    def complaints(self) -> list[str]:
        """Exceptions that nobody caught, breaches of the security policy, and other errors.

        Answers with a status that is not 200 are no mistakes of the page.
        """
        thrown = [
            str(event["exceptionDetails"]) for event in self.events("Runtime.exceptionThrown")
        ]
        entries = [event["entry"] for event in self.events("Log.entryAdded")]
        return thrown + [
            entry["text"]
            for entry in entries
            if entry["level"] in ("error", "warning") and entry["source"] != "network"
        ]


class Browser:
    """A running Chromium."""

    def __init__(self, path: str, folder: Path) -> None:
        self.events: list[dict[str, Any]] = []
        self._last_id = 0
        self._unread = b""
        # Beyond the numbers that the child's ends get, so that neither takes the other's place.
        child_reads, self._writes = map(_beyond, os.pipe())
        self._reads, child_writes = map(_beyond, os.pipe())
        arguments = [
            path,
            "--headless",
            "--remote-debugging-pipe",
            f"--user-data-dir={folder}",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--no-proxy-server",
        ]
        if os.geteuid() == 0:
            arguments.append("--no-sandbox")  # Chromium refuses to run as root with it
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC)
        self._pid = os.posix_spawn(
            path,
            arguments,
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, child_reads, 3),
                (os.POSIX_SPAWN_DUP2, child_writes, 4),
                (os.POSIX_SPAWN_DUP2, log, 1),
                (os.POSIX_SPAWN_DUP2, log, 2),
            ],
            setpgroup=0,
        )
        for end in (child_reads, child_writes, log):
            os.close(end)

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """The result of a method of the protocol; AssertionError where it fails."""
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._writes, data) :]
        deadline = time.monotonic() + DEADLINE_S
        while (answer := self._receive(deadline)).get("id") != self._last_id:
            self.events.append(answer)
        assert "error" not in answer, (method, answer["error"])
        result: dict[str, Any] = answer["result"]
        return result

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._unread:
            ready = select.select([self._reads], [], [], max(0.0, deadline - time.monotonic()))
            assert ready[0], "Chromium does not answer"
            more = os.read(self._reads, 1 << 20)
            assert more, "Chromium has ended"
            self._unread += more
        data, _, self._unread = self._unread.partition(b"\0")
        message: dict[str, Any] = json.loads(data)
        return message

    def close(self) -> None:
        """End it and all its processes."""
        os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._writes)
        os.close(self._reads)


def _beyond(descriptor: int) -> int:
    copy = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(descriptor)
    return copy


@contextmanager
def chromium(folder: Path) -> Iterator[Browser]:
    """A browser whose profile lies in ``folder``, until the end of the block."""
    browser = Browser(executable(), folder)
    try:
        yield browser
    finally:
        browser.close()
