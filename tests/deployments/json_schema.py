"""Hypothesis strategies from the part of JSON Schema that our OpenAPI document uses."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st

TEXT = st.text(st.characters(codec="utf-8"), max_size=12)
JUNK: st.SearchStrategy[Any] = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.floats(allow_nan=False, allow_infinity=False),
        TEXT,
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)),
    max_leaves=5,
)
"""Any JSON value."""


def values_of(schema: dict[str, Any], document: dict[str, Any]) -> st.SearchStrategy[Any]:
    """JSON values that ``schema`` allows."""
    if "$ref" in schema:
        return values_of(resolve(schema["$ref"], document), document)
    if "anyOf" in schema:
        return st.one_of([values_of(each, document) for each in schema["anyOf"]])
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    return _TYPES[schema["type"]](schema, document)


def resolve(reference: str, document: dict[str, Any]) -> dict[str, Any]:
    """What a ``$ref`` refers to."""
    found = document
    for part in reference.removeprefix("#/").split("/"):
        found = found[part]
    return found


def _numbers(schema: dict[str, Any], document: dict[str, Any]) -> st.SearchStrategy[Any]:
    low, high = schema.get("minimum"), schema.get("maximum")
    above = schema.get("exclusiveMinimum")
    return st.floats(
        low if above is None else above,
        high,
        exclude_min=above is not None,
        allow_nan=False,
        allow_infinity=False,
    )


def _integers(schema: dict[str, Any], document: dict[str, Any]) -> st.SearchStrategy[Any]:
    low, high = schema.get("minimum"), schema.get("maximum")
    # Mostly small ones: large counts are refused, and that is soon seen.
    return st.one_of(st.integers(low, min(8, high or 8)), st.integers(low, high))


def _strings(schema: dict[str, Any], document: dict[str, Any]) -> st.SearchStrategy[Any]:
    if pattern := schema.get("pattern"):
        return st.from_regex(pattern, fullmatch=True)
    return st.text(st.characters(codec="utf-8"), min_size=schema.get("minLength", 0), max_size=12)


def _arrays(schema: dict[str, Any], document: dict[str, Any]) -> st.SearchStrategy[Any]:
    items = values_of(schema["items"], document)
    return st.lists(items, min_size=schema.get("minItems", 0), max_size=4)


def _objects(schema: dict[str, Any], document: dict[str, Any]) -> st.SearchStrategy[Any]:
    if "properties" not in schema:
        keys = _strings(schema.get("propertyNames", {}), document)
        return st.dictionaries(
            keys, values_of(schema["additionalProperties"], document), max_size=3
        )
    fields = {name: values_of(each, document) for name, each in schema["properties"].items()}
    required = {name: fields.pop(name) for name in schema.get("required", ())}
    return st.fixed_dictionaries(required, optional=fields)


_TYPES = {
    "string": _strings,
    "integer": _integers,
    "number": _numbers,
    "boolean": lambda schema, document: st.booleans(),
    "null": lambda schema, document: st.none(),
    "array": _arrays,
    "object": _objects,
}
