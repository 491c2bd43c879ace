"""Request bodies drawn from the OpenAPI document, and spoiled ones."""

from __future__ import annotations

import json
from typing import Any

import hypothesis.strategies as st

from tests.deployments.json_schema import JUNK, TEXT, values_of

PATHS = ("/v1/completions", "/v1/chat/completions")


@st.composite
def bodies(draw: st.DrawFn, path: str, document: dict[str, Any], model: str) -> dict[str, Any]:
    """A body by the schema; half of them with a field or two that are anything."""
    operation = document["paths"][path]["post"]
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    body: dict[str, Any] = draw(values_of(schema, document))
    body["model"] = model
    body.setdefault("max_tokens", 5)
    if draw(st.booleans()):
        for _ in range(draw(st.integers(1, 2))):
            name = draw(st.one_of(st.sampled_from(sorted(body)), TEXT))
            body[name] = draw(JUNK)
    return body


@st.composite
def spoiled(draw: st.DrawFn, path: str, document: dict[str, Any], model: str) -> bytes:
    """The text of such a body with a byte of it lost or changed."""
    text = json.dumps(draw(bodies(path, document, model))).encode()
    place = draw(st.integers(0, len(text) - 1))
    return text[:place] + draw(st.binary(max_size=3)) + text[place + 1 :]
