"""Jinja that comes to an end: a template takes so many steps at most, on every machine as many.

A step is a turn of a loop or a call. Whoever writes the messages decides how many turns a template
takes, and whoever wrote the template whether it ends at all; a server runs it between the tokens of
others. How much memory it takes is not bounded here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

_LEFT = "steps left"
"""Where the context has them: no template can write a name with a blank."""
_MOST_BITS = 4096
"""Of a whole number: powers of powers take hours, and no thread can break in."""
_MOST_REPEATED = 1_000_000
"""Entries or characters that a multiplication makes."""


class _Steps:
    """What is left of the steps of one rendering."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._num_taken = 0

    def take(self) -> None:
        """Count one; TemplateError where it is one too many."""
        self._num_taken += 1
        if self._num_taken > self._most:
            raise jinja2.TemplateError(f"it takes more than {self._most:,} steps")


class _CountedLoops(CodeGenerator):
    """Compiles ``for x in y`` as ``for x in counted(y)``."""

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        counted = nodes.EnvironmentAttribute("counted")
        node.iter = nodes.Call(counted, [node.iter], [], None, None)
        super().visit_For(node, frame)


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, whose templates ``render`` runs for so many steps at most."""

    code_generator_class = _CountedLoops
    intercepted_binops = frozenset({"*", "**"})

    def call(self, context: Context, called: Any, /, *arguments: Any, **named: Any) -> Any:
        """Count the call; ``loop(...)`` of a recursive loop begins another one."""
        context.parent[_LEFT].take()
        if isinstance(called, LoopContext):
            arguments = (self.counted(context, arguments[0]), *arguments[1:])
        return super().call(context, called, *arguments, **named)

    @jinja2.pass_context
    def counted(self, context: Context, values: Iterable[Any]) -> Iterator[Any]:
        """``values``, each of which is a step."""
        steps: _Steps = context.parent[_LEFT]
        for value in values:
            steps.take()
            yield value

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Refuse a product that is out of all proportion."""
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length()
            bits = bits * right if operator == "**" else bits + right.bit_length()
            if bits > _MOST_BITS:
                raise jinja2.TemplateError("it makes a number that is too large")
        elif operator == "*":
            length, times = (right, left) if isinstance(left, int) else (left, right)
            if hasattr(length, "__len__") and len(length) * times > _MOST_REPEATED:
                raise jinja2.TemplateError("it repeats something too often")
        return super().call_binop(context, operator, left, right)


def render(template: jinja2.Template, variables: Mapping[str, Any], max_steps: int) -> str:
    """What ``template``, of a ``Sandbox``, writes; TemplateError after ``max_steps``."""
    return template.render({**variables, _LEFT: _Steps(max_steps)})
