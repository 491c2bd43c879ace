"""Where files lie: a path of the file system, or a place in a store that is named by a URI."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from shoal.errors import ConfigError

_REMEDY = "Give a URI such as s3://bucket/prefix, gs://bucket/prefix or file:///mnt/shared/runs"

_SCHEMES = ("s3", "gs", "gcs", "abfs", "abfss", "hdfs")
"""What pyarrow reaches by itself; with ``fsspec+`` before it, any scheme that fsspec knows."""

_S3_OPTIONS = ("region", "scheme", "endpoint_override", "tls_ca_file_path")


@dataclass(frozen=True, slots=True)
class StorePath:
    """A folder or an object of a store; made by ``location_of``, and put together like a path."""

    base: str
    """``scheme://bucket/key`` without a slash at its end."""

    options: str = ""
    """How to reach the store: what follows the question mark, such as a region or an endpoint."""

    def __truediv__(self, name: str) -> StorePath:
        return StorePath(f"{self.base}/{name}", self.options)

    def __str__(self) -> str:
        return f"{self.base}?{self.options}" if self.options else self.base

    @property
    def name(self) -> str:
        """What follows the last slash."""
        return self.base.rpartition("/")[2]

    @property
    def parent(self) -> StorePath:
        """The folder that it lies in."""
        return StorePath(self.base.rpartition("/")[0], self.options)

    @property
    def scheme(self) -> str:
        """What the URI begins with."""
        return self.base.partition("://")[0]

    @property
    def bucket(self) -> str:
        """The store's part that has a name of its own."""
        return self.base.partition("://")[2].partition("/")[0]

    @property
    def key(self) -> str:
        """What follows the bucket, with the slash before it."""
        _, slash, key = self.base.partition("://")[2].partition("/")
        return slash + key


Location = Path | StorePath
"""A folder or a file."""


def location_of(text: str, field: str = "PATH") -> Location:
    """What a user means: a path, or a URI with a scheme.

    ``file:///`` is a path. Raises ConfigError on ``field`` for a URI that names no place, or that
    holds credentials, which would be written wherever the URI is.
    """
    if "://" not in text:
        return Path(text)
    parts = urlsplit(text)
    if parts.scheme == "file":
        if parts.netloc or not parts.path.strip("/") or parts.query or parts.fragment:
            raise ConfigError(field, text, "it names no folder of this machine", _REMEDY)
        return Path(unquote(parts.path))
    if not parts.scheme or not parts.netloc or parts.fragment:
        raise ConfigError(field, text, "it names no place in a store", _REMEDY)
    if parts.password is not None or (parts.scheme == "s3" and parts.username is not None):
        shown = f"{parts.scheme}://...@{parts.hostname}{parts.path}"
        remedy = "Leave them to the environment, such as AWS_ACCESS_KEY_ID or a role"
        raise ConfigError(field, shown, "credentials do not belong into a URI", remedy)
    if parts.scheme not in _SCHEMES and not parts.scheme.startswith("fsspec+"):
        known = ", ".join(("file", *_SCHEMES))
        raise ConfigError(field, text, f"{parts.scheme} is none of {known}, fsspec+...", _REMEDY)
    strange = {key for key, _ in parse_qsl(parts.query)} - set(_S3_OPTIONS)
    if parts.scheme == "s3" and strange:
        problem = f"{min(strange)} is none of its options {', '.join(_S3_OPTIONS)}"
        raise ConfigError(field, text, problem, "Leave it out")
    key = parts.path.rstrip("/")
    if not {"", ".", ".."}.isdisjoint(key.split("/")[1:]):
        problem = "a name between its slashes is empty or one of dots"
        raise ConfigError(field, text, problem, "Name the place without")
    return StorePath(f"{parts.scheme}://{parts.netloc}{key}", parts.query)


def location_of_store(text: str, field: str) -> Location:
    """What ``checkpoint.storage`` means; raises ConfigError for a plain path as well."""
    if "://" not in text:
        raise ConfigError(field, text, "it is no URI", _REMEDY)
    return location_of(text, field)
