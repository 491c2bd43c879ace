"""The paths that OpenAI's clients ask for."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from shoal_deployments.openai.chat import ChatCompletions
from shoal_deployments.openai.completions import Completions
from shoal_deployments.openai.exchange import Exchange
from shoal_deployments.openai.prepare import unknown_model
from shoal_deployments.openai.schema import request_body
from shoal_deployments.openai.service import Service


def openai_routes(service: Service) -> APIRouter:
    """Routes below ``/v1``."""
    router = APIRouter(prefix="/v1")
    completions, chat_completions = Completions(), ChatCompletions()

    @router.get("/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(service)]}

    @router.get("/models/{name:path}")
    async def retrieve_model(name: str) -> dict[str, Any]:
        if name != service.engine.card.name:
            raise unknown_model(name, service.engine.card)
        return _model(service)

    @router.post("/completions", openapi_extra=request_body(completions.body_type))
    async def create_completion() -> Response:
        return Exchange(service, completions)

    @router.post("/chat/completions", openapi_extra=request_body(chat_completions.body_type))
    async def create_chat_completion() -> Response:
        return Exchange(service, chat_completions)

    return router


def _model(service: Service) -> dict[str, Any]:
    card = service.engine.card
    return {
        "id": card.name,
        "object": "model",
        "created": card.created,
        "owned_by": "shoal",
        "max_model_len": card.limits.context_length,
    }
