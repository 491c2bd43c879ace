"""Paths of a configuration made absolute: workers may run in other folders than the driver."""

from __future__ import annotations

import os

from shoal.config import RESUME_WORDS, Config


def with_absolute_paths(config: Config) -> Config:
    """The same configuration with every path resolved against the present folder."""
    model, data, checkpoint = config.model, config.data, config.checkpoint
    sources = tuple(
        source.model_copy(update={"path": os.path.abspath(source.path)}) for source in data.sources
    )
    return config.model_copy(
        update={
            "run": config.run.model_copy(update={"dir": os.path.abspath(config.run.dir)}),
            "model": model.model_copy(update={"path": _absolute(model.path)}),
            "data": data.model_copy(
                update={"sources": sources, "tokenizer": _absolute(data.tokenizer, "bytes")}
            ),
            "checkpoint": checkpoint.model_copy(
                update={"resume": _absolute(checkpoint.resume, *RESUME_WORDS)}
            ),
        }
    )


def _absolute(path: str | None, *words: str) -> str | None:
    """A URI of a store stays as it is."""
    if path is None or path in words or "://" in path:
        return path
    return os.path.abspath(path)
