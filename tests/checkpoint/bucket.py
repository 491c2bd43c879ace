"""An S3-compatible server on loopback whose answers a test can spoil."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from pyarrow import fs
from werkzeug.serving import WSGIRequestHandler, make_server

from shoal.storage import StorePath, location_of

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_EC2_METADATA_DISABLED": "true",
}

Harm = Literal["500", "403", "hold"] | None
"""What becomes of a request; those on hold are refused when the server ends."""

Rule = Callable[[str, str], Harm]
"""Looks at a request's method and path."""

_ANSWERS = {
    "500": ("500 Internal Server Error", "InternalError"),
    "403": ("403 Forbidden", "AccessDenied"),
    "hold": ("500 Internal Server Error", "InternalError"),
}
_MOST_S = 60.0


@dataclass(kw_only=True, eq=False)
class Bucket:
    """One bucket of a server."""

    port: int
    name: str
    rule: Rule = lambda method, path: None
    held: int = 0
    """Requests that were put on hold."""
    seen: int = 0

    @property
    def options(self) -> str:
        """How the server is reached."""
        return f"scheme=http&endpoint_override=127.0.0.1:{self.port}"

    def uri(self, prefix: str) -> str:
        """The URI of a prefix."""
        return f"s3://{self.name}/{prefix}?{self.options}"

    def at(self, prefix: str) -> StorePath:
        """A place in it."""
        place = location_of(self.uri(prefix))
        assert isinstance(place, StorePath)
        return place

    def keys(self, prefix: str = "") -> set[str]:
        """All objects, by what follows the prefix."""
        root = f"{self.name}/{prefix}".rstrip("/")
        selector = fs.FileSelector(root, recursive=True, allow_not_found=True)
        found = self._filesystem().get_file_info(selector)
        return {info.path[len(root) + 1 :] for info in found if info.is_file}

    def read(self, key: str) -> bytes:
        """An object."""
        with self._filesystem().open_input_stream(f"{self.name}/{key}") as stream:
            data: bytes = stream.read()
            return data

    def write(self, key: str, data: bytes) -> None:
        """Make or overwrite an object."""
        with self._filesystem().open_output_stream(f"{self.name}/{key}") as stream:
            stream.write(data)

    def empty(self) -> None:
        """Delete all objects."""
        self._filesystem().delete_dir_contents(self.name)

    def delete(self, key: str) -> None:
        """Delete an object."""
        self._filesystem().delete_file(f"{self.name}/{key}")

    def _filesystem(self) -> Any:
        return fs.S3FileSystem(
            scheme="http",
            endpoint_override=f"127.0.0.1:{self.port}",
            allow_bucket_creation=True,
            access_key="test",
            secret_key="test",
            region="us-east-1",
        )


class _Quiet(WSGIRequestHandler):
    def log_request(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def serving() -> Iterator[Bucket]:
    """A server with one empty bucket, and the credentials for it in the environment."""
    application = DomainDispatcherApplication(create_backend_app)
    released = threading.Event()

    def answer(environ: dict[str, Any], respond: Callable[..., Any]) -> Iterable[bytes]:
        bucket.seen += 1
        harm = bucket.rule(environ["REQUEST_METHOD"], environ["PATH_INFO"])
        if harm == "hold":
            bucket.held += 1
            released.wait(_MOST_S)
        if harm in _ANSWERS:
            status, code = _ANSWERS[harm]
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            respond(status, [("Content-Type", "application/xml")])
            return [f"<Error><Code>{code}</Code><Message>scripted</Message></Error>".encode()]
        reply: Iterable[bytes] = application(environ, respond)
        return reply

    server = make_server("127.0.0.1", 0, answer, threaded=True, request_handler=_Quiet)
    bucket = Bucket(port=server.port, name=f"shelf-{server.port}")  # moto has one set of all
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    with _environment():
        try:
            bucket._filesystem().create_dir(bucket.name)
            yield bucket
        finally:
            released.set()
            server.shutdown()
            server.server_close()
            thread.join()


@contextmanager
def _environment() -> Iterator[None]:
    before = {name: os.environ.get(name) for name in CREDENTIALS}
    os.environ.update(CREDENTIALS)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
