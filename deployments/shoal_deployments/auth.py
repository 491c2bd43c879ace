"""API keys: who may ask."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Iterable
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from shoal.config import AuthSettings
from shoal.errors import ConfigError
from shoal_deployments.console import CONSOLE_PATHS
from shoal_deployments.openai.errors import ApiError, error_response
from shoal_deployments.route_path import route_path

OPEN_PATHS = frozenset({"/health"}) | CONSOLE_PATHS
"""What probes and browsers reach without a key; the console's own requests carry one."""


class ApiKeys:
    """The keys that are let in; none lets everyone in.

    Digests of equal length are compared, each of them every time, so that the time taken tells
    neither a key's length nor how far a guess was right.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = tuple(_digest(key.encode("utf-8", "surrogateescape")) for key in keys)

    @classmethod
    def read(cls, settings: AuthSettings) -> ApiKeys:
        """The keys that ``settings`` point to; ConfigError where a source holds none."""
        keys: list[str] = []
        if settings.keys_file is not None:
            keys += _keys_in_file(settings.keys_file)
        if settings.keys_variable is not None:
            keys += _keys_in_variable(settings.keys_variable)
        return cls(keys)

    def __len__(self) -> int:
        return len(self._digests)

    def admits(self, authorization: str) -> bool:
        """Whether the value of the header ``Authorization`` carries one of the keys."""
        if not self._digests:
            return True
        scheme, _, key = authorization.partition(" ")
        # Servers hand the bytes of a header over as if they were Latin-1.
        given = _digest(key.strip(" \t").encode("latin-1", "backslashreplace"))
        matches = [hmac.compare_digest(given, known) for known in self._digests]
        return scheme.lower() == "bearer" and any(matches)


class Authentication:
    """ASGI middleware that answers 401 before it reads a body."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or route_path(scope) in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("authorization", "")
        if self._keys.admits(given):
            await self._app(scope, receive, send)
            return
        await error_response(_refusal(given))(scope, receive, send)


def _refusal(given: str) -> ApiError:
    message = (
        "The API key is not one of this server's."
        if given
        else "No API key was given. Send it in the header Authorization: Bearer KEY."
    )
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _keys_in_file(path: str) -> list[str]:
    try:
        # Some editors write a mark before the first line, which is no part of its key.
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "serve.auth.keys_file", path, f"cannot be read: {error}", "Give a file of API keys"
        ) from error
    stripped = (line.strip() for line in lines)
    keys = [line for line in stripped if line and not line.startswith("#")]
    if not keys:
        raise ConfigError("serve.auth.keys_file", path, "holds no key", "Write one API key a line")
    return keys


def _keys_in_variable(name: str) -> list[str]:
    keys = [key.strip() for key in os.environ.get(name, "").split(",") if key.strip()]
    if not keys:
        raise ConfigError(
            "serve.auth.keys_variable",
            name,
            "the environment has no key in it",
            f"Set {name} to API keys, separated by commas",
        )
    return keys
