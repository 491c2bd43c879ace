"""Steps in a store of objects, which cannot rename: a step is a folder with a manifest.

    step-00000010-<token>/__0_0.distcp      written whole or not at all, like every object
    step-00000010-<token>/.save/...         there while the save is under way
    step-00000010-<token>/manifest.json     the last to come, the first to go

The token is the save's own, so that what a save left behind, or still writes, is never part of
another save of the same step. Reached through ``pyarrow.fs``, with the environment's credentials.
"""

from __future__ import annotations

import errno
import logging
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from datetime import datetime
from functools import cache
from typing import Any
from urllib.parse import parse_qsl

from shoal.storage.local import step_name
from shoal.storage.location import Location, StorePath
from shoal.storage.medium import (
    MANIFEST_NAME,
    SAVE_FOLDER,
    Sink,
    Source,
    State,
    StepFolder,
)

logger = logging.getLogger(__name__)

_BEGUN = "begun"
_STEP = re.compile(r"step-(\d{8,})-[0-9a-f]{8}")
_CONNECT_TIMEOUT_S = 5.0
_ATTEMPTS = 4
"""Of a request that the store refuses for the moment, or that gets no answer for three seconds."""

_REQUESTS = 16
"""Under way at a time: each takes long, whatever the cores."""

_PROBE = "/x"
"""A key, to see how a file system calls it."""


class StoreMedium:
    """See ``Medium``; one store, as one set of options reaches it."""

    look_s = 0.25

    def __init__(self, filesystem: Any, root: str) -> None:
        """``root`` is what ``filesystem`` calls the bucket."""
        self._filesystem = filesystem
        self._root = root

    def num_readers(self, sharers: int = 1) -> int:
        """See ``Files``."""
        return _REQUESTS

    def create(self, file: Location) -> Sink:
        """See ``Files``."""
        return _StoreSink(self._filesystem, self._key(file))

    @contextmanager
    def open(self, file: Location) -> Iterator[Source]:
        """See ``Files``."""
        with closing(self._filesystem.open_input_file(self._key(file))) as stream:
            yield _StoreSource(stream)

    def read(self, file: Location) -> bytes:
        """See ``Files``."""
        with self._filesystem.open_input_stream(self._key(file)) as stream:
            data: bytes = stream.read()
            return data

    def put(self, file: Location, data: bytes) -> None:
        """See ``Files``."""
        with self._filesystem.open_output_stream(self._key(file)) as stream:
            stream.write(data)

    def delete(self, file: Location) -> None:
        """See ``Files``."""
        self._filesystem.delete_file(self._key(file))

    def sizes(self, folder: Location) -> dict[str, int]:
        """See ``Files``."""
        start = len(self._key(folder)) + 1
        return {info.path[start:]: info.size for info in self._files(folder)}

    def changed(self, file: Location) -> datetime | None:
        """When an object was written, by the store's clock; unset where there is none."""
        time: datetime | None = self._filesystem.get_file_info(self._key(file)).mtime
        return time

    def step_folders(self, folder: Location) -> Iterator[StepFolder]:
        """See ``Medium``."""
        names: dict[str, set[str]] = {}
        for path in self.sizes(folder):
            step, _, name = path.partition("/")
            names.setdefault(step, set()).add(name.partition("/")[0])
        for step, files in names.items():
            if match := _STEP.fullmatch(step):
                state = State.UNDER_WAY if SAVE_FOLDER in files else State.DELETED
                state = State.PUBLISHED if MANIFEST_NAME in files else state
                yield StepFolder(number=int(match[1]), path=folder / step, state=state)

    def draft(self, folder: Location, number: int, token: str) -> Location:
        """See ``Medium``."""
        return folder / f"{step_name(number)}-{token}"

    def final(self, folder: Location, number: int, token: str) -> Location:
        """See ``Medium``."""
        return self.draft(folder, number, token)

    def begin(self, draft: Location) -> None:
        """See ``Medium``."""
        self.put(draft / SAVE_FOLDER / _BEGUN, b"")

    def has_begun(self, draft: Location) -> bool:
        """See ``Medium``."""
        begun = self._key(draft / SAVE_FOLDER / _BEGUN)
        return bool(self._filesystem.get_file_info(begun).is_file)

    def publish(self, draft: Location, final: Location, added: Collection[str]) -> None:
        """See ``Medium``. The manifest has published it already."""
        try:
            self._delete_folder(draft / SAVE_FOLDER)
        except OSError as error:
            logger.warning("%s: notes of its save stay behind: %s", draft, error)

    def remove(self, path: Location) -> None:
        """See ``Medium``."""
        with suppress(FileNotFoundError):
            self.delete(path / MANIFEST_NAME)
        self._delete_folder(path)

    def set_aside(self, step: StepFolder, token: str) -> None:
        """See ``Medium``. Every save has a folder of its own."""

    def room(self, folder: Location) -> int | None:
        """See ``Medium``."""
        return None

    def _files(self, folder: Location) -> Iterator[Any]:
        from pyarrow import fs

        selector = fs.FileSelector(self._key(folder), recursive=True, allow_not_found=True)
        return (info for info in self._filesystem.get_file_info(selector) if info.is_file)

    def _delete_folder(self, folder: Location) -> None:
        with suppress(FileNotFoundError):
            self._filesystem.delete_dir(self._key(folder))

    def _key(self, location: Location) -> str:
        assert isinstance(location, StorePath)
        return self._root + location.key


@cache
def connect(scheme: str, bucket: str, options: str) -> StoreMedium:
    """One process's way to a store; kept, for it takes a while to find.

    Raises ``OSError`` where there is no such store.
    """
    # pyarrow takes a while to load, and most runs have no store.
    from pyarrow import fs

    if scheme == "s3":
        given = dict(parse_qsl(options))
        if not given.keys() & {"region", "endpoint_override"}:
            given["region"] = fs.resolve_s3_region(bucket)
        filesystem = fs.S3FileSystem(
            **given,
            connect_timeout=_CONNECT_TIMEOUT_S,
            allow_delayed_open=True,
            retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=_ATTEMPTS),
        )
        return StoreMedium(filesystem, bucket)
    uri = f"{scheme}://{bucket}{_PROBE}"
    try:
        filesystem, path = fs.FileSystem.from_uri(f"{uri}?{options}" if options else uri)
    except ValueError as error:
        raise OSError(errno.EINVAL, str(error)) from error
    return StoreMedium(filesystem, path.removesuffix(_PROBE))


class _StoreSink:
    """See ``Sink``."""

    def __init__(self, filesystem: Any, key: str) -> None:
        self._filesystem, self._key = filesystem, key
        self._stream = filesystem.open_output_stream(key)

    def write(self, view: memoryview) -> None:
        """See ``Sink``."""
        self._stream.write(view)

    def finish(self, *, flush: bool) -> int:
        """See ``Sink``. An object that is there lasts."""
        self._stream.close()
        size: int = self._filesystem.get_file_info(self._key).size
        return size

    def close(self) -> None:
        """See ``Sink``. Unfinished, it leaves an object that no manifest will name."""
        with suppress(OSError):
            self._stream.close()


class _StoreSource:
    """See ``Source``."""

    piece_bytes = 2**30
    """Each request takes long, however little it asks for."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def read(self, start: int, memories: Sequence[memoryview]) -> int:
        """See ``Source``; by one request."""
        data = memoryview(self._stream.read_at(sum(map(len, memories)), start))
        rest = data
        for memory in memories:
            part, rest = rest[: len(memory)], rest[len(memory) :]
            memory[: len(part)] = part
        return len(data)
