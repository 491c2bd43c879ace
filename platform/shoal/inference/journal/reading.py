"""Journals read back, also those of processes that were killed while they wrote."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from shoal.inference.journal.records import Began, Grew, Record, content_of, decode
from shoal.inference.journal.segments import segments_in
from shoal.inference.request import Request

logger = logging.getLogger(__name__)


@dataclass(eq=False, kw_only=True, slots=True)
class RecordedAnswer:
    """What a journal has of one request."""

    request: Request
    tokens: dict[int, list[int]] = field(default_factory=dict)
    """Tokens of each choice from its first on."""
    finish_reasons: dict[int, str] = field(default_factory=dict)
    """Of the choices that ended."""

    def add(self, record: Grew) -> None:
        """Add what came for a choice; what was stored twice counts once."""
        tokens = self.tokens.setdefault(record.choice, [])
        if record.position <= len(tokens):
            tokens[record.position :] = [
                *record.token_ids,
                *tokens[record.position + len(record.token_ids) :],
            ]
            if record.finish_reason is not None:
                self.finish_reasons[record.choice] = record.finish_reason


def read_journal(folder: Path) -> Iterator[Record]:
    """All records of the journals in ``folder`` and below it, in the order of their segments.

    The end of a segment that was torn by a crash is passed over. So is a damaged line before it, of
    which a warning tells. A record may come twice where the disk failed.

    Raises:
        OSError: a file cannot be read.
        WorkError: a segment has another version's format.
    """
    folders = [folder, *sorted(path for path in folder.rglob("*") if path.is_dir())]
    for path in (path for each in folders for path in segments_in(each)):
        yield from _records(path)


def read_answers(folder: Path) -> dict[str, RecordedAnswer]:
    """What the records of ``read_journal`` add up to, by the requests' ids."""
    answers: dict[str, RecordedAnswer] = {}
    for record in read_journal(folder):
        if isinstance(record, Began):
            answers.setdefault(record.request.id, RecordedAnswer(request=record.request))
        elif record.request_id in answers:
            answers[record.request_id].add(record)
    return answers


def _records(path: Path) -> Iterator[Record]:
    num_damaged = 0
    with path.open("rb") as lines:
        for line in lines:
            content = content_of(line)
            if content is None:
                num_damaged += 1
                continue
            if num_damaged:
                logger.warning("%s: %d damaged lines are passed over", path, num_damaged)
                num_damaged = 0
            record = decode(content)
            if record is not None:
                yield record
