"""The OpenAPI document: request bodies are described by the models that check them."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema

from shoal_deployments.openai.requests import ChatCompletionBody, CompletionBody, GenerationBody

_PLACE = "#/components/schemas/{model}"


def request_body(body_type: type[GenerationBody]) -> dict[str, Any]:
    """What a route says of its body, which it reads by itself."""
    schema = {"$ref": _PLACE.format(model=body_type.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def describe(app: FastAPI) -> None:
    """Add the models that ``request_body`` refers to to the document of ``app``."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        document = generate()
        bodies: list[type[GenerationBody]] = [CompletionBody, ChatCompletionBody]
        _, definitions = models_json_schema(
            [(body, "validation") for body in bodies], ref_template=_PLACE
        )
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        schemas.update(definitions["$defs"])
        return document

    app.openapi = openapi  # type: ignore[method-assign]
