"""The page's files, out of the package and from memory.

They are plain HTML, CSS and ES modules: nothing is built, and nothing is loaded from elsewhere.
The page asks this server's own API, like any other client, by addresses relative to its own.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import Receive, Scope, Send

from shoal_deployments.route_path import route_path

FILES = (
    "index.html",
    "answer.js",
    "api.js",
    "certificate.js",
    "console.css",
    "conversation.js",
    "events.js",
    "icon.svg",
    "key.js",
    "main.js",
    "rate.js",
    "replicas.js",
    "settings.js",
    "template.js",
)
"""What the page consists of, itself the first."""

CONSOLE_PATHS = frozenset(("/", *(f"/console/{name}" for name in FILES[1:])))
"""They need no key: the page asks its user for one."""

_TYPES = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}

_HEADERS = {
    # Browsers ask each time whether a file has changed, so that no two versions are mixed.
    "Cache-Control": "no-cache",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def console_routes() -> list[BaseRoute]:
    """Routes of all files, read now, for GET and HEAD."""
    folder = resources.files("shoal_deployments.console") / "static"
    routes: list[BaseRoute] = [_BarePrefix()]
    for name in FILES:
        path = "/" if name == FILES[0] else f"/console/{name}"
        file = _File.of(name, (folder / name).read_bytes())
        routes.append(Route(path, file.answer, methods=["GET"], include_in_schema=False))
    return routes


@dataclass(frozen=True, kw_only=True, slots=True)
class _File:
    """One file as it is answered."""

    content: bytes
    content_type: str
    etag: str

    @classmethod
    def of(cls, name: str, content: bytes) -> _File:
        return cls(
            content=content,
            content_type=_TYPES[name.rpartition(".")[2]],
            etag=f'"{hashlib.sha256(content).hexdigest()[:32]}"',
        )

    async def answer(self, request: Request) -> Response:
        """The file, or status 304 where the browser has it already."""
        headers = {**_HEADERS, "ETag": self.etag}
        known = request.headers.get("if-none-match", "")
        if self.etag in {tag.strip().removeprefix("W/") for tag in known.split(",")}:
            return Response(status_code=304, headers=headers)
        headers |= {"Content-Type": self.content_type, "Content-Length": str(len(self.content))}
        return Response(b"" if request.method == "HEAD" else self.content, headers=headers)


class _BarePrefix(BaseRoute):
    """Sends who asks for the application's prefix without its slash to the page below it."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        is_bare = scope["type"] == "http" and route_path(scope) == ""
        return (Match.FULL if is_bare else Match.NONE), {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        await RedirectResponse(f"{scope['root_path']}/")(scope, receive, send)
