"""Which medium a location lies on."""

from __future__ import annotations

from shoal.storage.local import LocalMedium
from shoal.storage.location import Location, StorePath
from shoal.storage.medium import Medium
from shoal.storage.store import connect

_LOCAL = LocalMedium()


def medium_of(location: Location) -> Medium:
    """The medium of a location.

    Raises ``OSError`` where a store is not there, and ``ValueError`` for options that it does not
    know.
    """
    if isinstance(location, StorePath):
        return connect(location.scheme, location.bucket, location.options)
    return _LOCAL


def read_file(file: Location) -> bytes:
    """All of a small file; raises ``OSError``."""
    return medium_of(file).read(file)
