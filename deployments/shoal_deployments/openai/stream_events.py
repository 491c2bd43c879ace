"""The events of one stream, in their order, without those that the client already has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from shoal.inference.protocol import Output
from shoal_deployments.openai.answers import Answers, Choice
from shoal_deployments.openai.event_ids import EventIds, Progress
from shoal_deployments.openai.sse import Event
from shoal_deployments.openai.writer import Chunk, Writer, usage_of


class StreamEvents:
    """What ``writer`` writes of ``answers`` from ``progress`` on, which goes along with it."""

    def __init__(
        self, writer: Writer, answers: Answers, progress: Progress, ids: EventIds | None
    ) -> None:
        """Without ``ids`` the events have none."""
        self.answers = answers
        self._writer = writer
        self._progress = progress
        self._ids = ids
        self._had = [replace(sent) for sent in progress.sent]
        """What the client had of each choice when this began."""
        self._num_tokens: Counter[int] = Counter()

    def opening(self) -> list[Event]:
        """Events before the first token."""
        choices = self.answers.blank_choices()
        for choice, had in zip(choices, self._had, strict=True):
            choice.is_known = had.num_tokens is not None
        return self._events(self._writer.opening(choices))

    def split(self, outputs: Iterable[Output]) -> Iterable[tuple[list[Output], bool]]:
        """``outputs``, the next of the answer, parted into what the client has, and the rest."""
        known: list[Output] = []
        new: list[Output] = []
        for output in outputs:
            index = self.answers.index_of(output)
            self._num_tokens[index] += len(output.token_ids)
            has_ended = output.finish_reason is not None
            is_known = self._had[index].has(self._num_tokens[index], has_ended)
            (known if is_known else new).append(output)
        return [(some, some is known) for some in (known, new) if some]

    def of(self, added: Sequence[Choice]) -> list[Event]:
        """Events for what was added to some choices."""
        return self._events(self._writer.chunks(added))

    def closing(self) -> list[Event]:
        """Events after the last token."""
        if self._progress.has_usage:
            return []
        contents = self._writer.closing(usage_of(self.answers))
        self._progress.has_usage = bool(contents)
        return [self._event(content) for content in contents]

    def _events(self, chunks: Sequence[Chunk]) -> list[Event]:
        events = []
        for chunk in chunks:
            if not chunk.choice.is_known:
                self._progress.add(chunk.choice)
                if chunk.content is not None:
                    events.append(self._event(chunk.content))
        return events

    def _event(self, content: dict[str, Any]) -> Event:
        return Event(content=content, id=None if self._ids is None else self._ids.current())
