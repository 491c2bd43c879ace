"""Where a request goes within the application, whatever prefix the application lives under."""

from __future__ import annotations

from starlette.types import Scope


def route_path(scope: Scope) -> str:
    """The path below ``root_path``; empty for the prefix itself without its slash.

    Servers differ in whether ``path`` has the prefix: ASGI says that it does, proxies cut it off.
    """
    path: str = scope["path"]
    prefix: str = scope.get("root_path", "")
    rest = path.removeprefix(prefix)
    return rest if rest == "" or rest.startswith("/") else path
