"""Chat templates: Jinja in a sandbox, by the conventions of Hugging Face.

Which part of the rendered text is the assistant's:

* a template with ``{% generation %}`` blocks says so itself;
* without them, the assistant's turn number i is what ``render(messages up to i)`` adds to
  ``render(messages before i, with the generation prompt)``. This holds only if each of the two
  is a prefix of the whole text, which is checked: a template that rewrites earlier turns, as
  some do to drop reasoning, would put the mask on the wrong words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser

from shoal.data.tokenizer.interface import Message, check_messages, well_formed
from shoal.data.tokenizer.sandbox import Sandbox, render
from shoal.errors import ConfigError

# Around code points that Unicode sets aside for use inside a program.
_OPEN, _CLOSE = "\ufdd0generation\ufdd0", "\ufdd1generation\ufdd1"
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")

_STEPS = 20_000
"""What a template may take for any chat: some 10 ms."""
_STEPS_PER_PAIR = 4
"""What it may take more for each pair of messages: some look from each turn at all others."""

# A template is a program of its author: besides Jinja's own errors it may add a number to a text,
# index past a list, have no end, or write more than there is memory for.
_REFUSALS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    RecursionError,
    MemoryError,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RenderedChat:
    """One chat as text, with the assistant's part."""

    text: str

    spans: tuple[tuple[int, int], ...]
    """Half-open ranges of characters that are the assistant's, in order."""

    is_marked: bool
    """Whether the template's own ``{% generation %}`` blocks gave the spans."""


class ChatTemplate:
    """One compiled template.

    ``source`` is Jinja; ``special_tokens`` maps names such as ``eos_token`` to their text, which
    the template may print. ConfigError if the source does not compile.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = dict(special_tokens)
        self._has_generation = _GENERATION.search(source) is not None
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                "data.tokenizer",
                source[:80],
                f"its chat template is not valid Jinja: {error}",
                "Mend the template",
            ) from error

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """Text of ``messages``; ConfigError on field ``messages`` where the template refuses."""
        text = self._render(check_messages(messages), add_generation_prompt)
        return _split_markers(text).text if self._has_generation else text

    def render_with_spans(self, messages: Sequence[Message]) -> RenderedChat:
        """Text of ``messages`` and which of it is the assistant's; ConfigError as ``render``."""
        plain = check_messages(messages)
        text = self._render(plain, False)
        if self._has_generation:
            return _split_markers(text)
        spans = tuple(
            self._turn(plain, number, text)
            for number, message in enumerate(plain)
            if message["role"] == "assistant"
        )
        return RenderedChat(text=text, spans=spans, is_marked=False)

    def _turn(self, messages: list[dict[str, Any]], number: int, text: str) -> tuple[int, int]:
        """Range of characters that turn ``number``, an assistant's, adds."""
        before = self._render(messages[:number], True)
        after = self._render(messages[: number + 1], False)
        if not (after.startswith(before) and text.startswith(after)):
            raise ConfigError(
                "messages",
                [message["role"] for message in messages],
                f"the chat template writes the turns up to number {number + 1} differently once "
                "more turns follow, so the assistant's words cannot be told from the prompt",
                "Put {% generation %} and {% endgeneration %} around them in the chat template",
            )
        return len(before), len(after)

    def _render(self, messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
        """Text, with markers around the assistant's words if the template has blocks for them."""
        try:
            if self._has_generation:
                _refuse_markers(messages)
            variables = {
                "messages": messages,
                "tools": None,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
                **self._special_tokens,
            }
            text = render(self._template, variables, _STEPS + _STEPS_PER_PAIR * len(messages) ** 2)
        except _REFUSALS as error:
            raise ConfigError(
                "messages",
                [message["role"] for message in messages],
                f"the chat template refuses them: {str(error) or type(error).__name__}",
                "Change the messages, or the chat template",
            ) from error
        return well_formed(text)


class _Generation(Extension):
    """``{% generation %}``: puts markers around what the assistant says."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: jinja2.runtime.Macro) -> str:
        return f"{_OPEN}{caller()}{_CLOSE}"


def _environment() -> Sandbox:
    """The sandbox that Hugging Face's templates are written for."""
    environment = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _refuse_markers(messages: list[dict[str, Any]]) -> None:
    words = json.dumps(messages, ensure_ascii=False, default=str)
    if _OPEN in words or _CLOSE in words:
        raise ConfigError(
            "messages",
            [message["role"] for message in messages],
            f"they hold {_OPEN!a} or {_CLOSE!a}, which mark the assistant's words",
            "Remove it",
        )


def _split_markers(marked: str) -> RenderedChat:
    """Take the markers out and note where they stood."""
    pieces: list[str] = []
    spans: list[tuple[int, int]] = []
    length = start = 0
    for piece in re.split(f"({_OPEN}|{_CLOSE})", marked):
        if piece == _OPEN:
            start = length
        elif piece == _CLOSE:
            spans.append((start, length))
        else:
            pieces.append(piece)
            length += len(piece)
    return RenderedChat(text="".join(pieces), spans=tuple(spans), is_marked=True)
