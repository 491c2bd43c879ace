"""YAML as this project reads and writes it: the core schema of YAML 1.2, duplicate keys refused.

PyYAML follows YAML 1.1, in which ``on`` is a truth value, ``1e-3`` is text, ``0777`` is octal and
``12:30`` is a number. The core schema (yaml.org/spec/1.2.2, section 10.3) has none of these traps:
``true`` and ``false`` are the truth values, every usual spelling of a number is a number, and all
else is text. Keys are text as written: those of ``1: x`` and ``on: x`` are ``"1"`` and ``"on"``.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml

from shoal.errors import ConfigError

_NULL = "tag:yaml.org,2002:null"
_BOOL = "tag:yaml.org,2002:bool"
_INT = "tag:yaml.org,2002:int"
_FLOAT = "tag:yaml.org,2002:float"
_MERGE = "tag:yaml.org,2002:merge"

_CORE_SCHEMA = (
    (_NULL, re.compile(r"^(?:~|null|Null|NULL|)$"), [*"~nN", ""]),
    (_BOOL, re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), [*"tTfF"]),
    (_INT, re.compile(r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$"), [*"-+0123456789"]),
    (
        _FLOAT,
        re.compile(
            r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
            r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
        ),
        [*"-+.0123456789"],
    ),
    (_MERGE, re.compile(r"^<<$"), ["<"]),
)


class _Reader(yaml.SafeLoader):
    """Plain values only, by the core schema."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """The mapping's node; refuses a key that is no plain text or is written twice."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        written: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(
                    problem="a key must be plain text", problem_mark=key.start_mark
                )
            if key.tag != _MERGE and key.value in written:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key.value!r} is written twice", problem_mark=key.start_mark
                )
            written.add(key.value)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """The mapping with its keys as text; its own keys win over merged ones."""
        self.flatten_mapping(node)
        return {key.value: self.construct_object(value, deep=True) for key, value in node.value}

    def construct_core_bool(self, node: yaml.ScalarNode) -> bool:
        return str(node.value).lower() == "true"

    def construct_core_int(self, node: yaml.ScalarNode) -> int:
        base = {"0o": 8, "0x": 16}.get(node.value[:2], 10)
        try:
            return int(node.value, base)
        except ValueError as error:
            raise _not_a_number(node) from error

    def construct_core_float(self, node: yaml.ScalarNode) -> float:
        text = node.value.lower().replace(".inf", "inf").replace(".nan", "nan")
        try:
            return float(text)
        except ValueError as error:
            raise _not_a_number(node) from error


def _not_a_number(node: yaml.ScalarNode) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem="this is no number", problem_mark=node.start_mark)


class _Writer(yaml.SafeDumper):
    """Quotes whatever either YAML 1.1 or the core schema would not read back as text."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _tag, _pattern, _first in _CORE_SCHEMA:
    _Reader.add_implicit_resolver(_tag, _pattern, _first)
    _Writer.add_implicit_resolver(_tag, _pattern, _first)
_Reader.add_constructor(_BOOL, _Reader.construct_core_bool)
_Reader.add_constructor(_INT, _Reader.construct_core_int)
_Reader.add_constructor(_FLOAT, _Reader.construct_core_float)
for _tag in ("timestamp", "binary", "set", "omap", "pairs"):
    _Reader.yaml_constructors.pop(f"tag:yaml.org,2002:{_tag}")


def read_yaml(text: str, field: str) -> Any:
    """The plain value that ``text`` holds; raises ``ConfigError`` naming ``field`` and the line."""
    try:
        return yaml.load(text, Loader=_Reader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "text"
        remedy = "Correct the YAML there"
        if "'\\t'" in str(error.problem):
            remedy = "Replace the tab by spaces"
        raise ConfigError(field, where, f"is not valid YAML: {error.problem}", remedy) from error
    except yaml.YAMLError as error:
        problem = f"is not valid YAML: {str(error).splitlines()[0]}"
        raise ConfigError(field, "text", problem, "Save it as plain UTF-8 text") from error
    except RecursionError:
        raise ConfigError(field, "text", "is nested too deeply", "Correct the brackets") from None


def read_scalar(text: str) -> Any:
    """The value of one unquoted scalar: null, a truth value, a number, or the text itself."""
    for tag, pattern, _ in _CORE_SCHEMA:
        if pattern.match(text) and tag != _MERGE:
            reader = _Reader("")
            try:
                return reader.construct_object(yaml.ScalarNode(tag, text))
            finally:
                reader.dispose()
    return text


def write_yaml(value: Any) -> str:
    """YAML text that ``read_yaml`` reads back as ``value``; keys keep their order."""
    return yaml.dump(value, Dumper=_Writer, sort_keys=False, allow_unicode=True)
