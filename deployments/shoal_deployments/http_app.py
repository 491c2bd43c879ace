"""The HTTP application of one frontend."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from shoal.config import ServeSettings
from shoal.data.tokenizer import Tokenizer
from shoal.errors import ShoalError
from shoal_deployments.access_log import AccessLog
from shoal_deployments.auth import ApiKeys, Authentication
from shoal_deployments.console import console_routes
from shoal_deployments.engine_client import EngineClient
from shoal_deployments.metrics import Metrics
from shoal_deployments.openai.errors import error_response, on_exception, on_http_exception
from shoal_deployments.openai.failures import api_error
from shoal_deployments.openai.routes import openai_routes
from shoal_deployments.openai.schema import describe
from shoal_deployments.openai.service import Admission, Service
from shoal_deployments.operations import operation_routes
from shoal_deployments.tokenizing import Tokenizing


def build_http_app(engine: EngineClient, tokenizer: Tokenizer, settings: ServeSettings) -> FastAPI:
    """The application that serves ``engine``'s model under OpenAI's paths.

    Reads the API keys that ``settings.auth`` points to: ConfigError where there are none.
    """
    metrics = Metrics()
    service = Service(
        engine=engine,
        tokenizing=Tokenizing(tokenizer),
        limits=settings.limits,
        journal=settings.journal,
        admission=Admission(settings.limits),
        metrics=metrics,
    )
    metrics.held.set_function(lambda: service.admission.num_held)

    async def on_shoal_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ShoalError)
        return error_response(api_error(error, settings.limits.retry_after_s))

    app = FastAPI(
        title="Shoal",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        exception_handlers={
            ShoalError: on_shoal_error,
            HTTPException: on_http_exception,
            Exception: on_exception,
        },
    )
    app.include_router(openai_routes(service))
    app.include_router(operation_routes(service))
    app.router.routes.extend(console_routes())
    app.add_middleware(Authentication, keys=ApiKeys.read(settings.auth))
    app.add_middleware(AccessLog, metrics=metrics)
    app.router.add_event_handler("shutdown", service.tokenizing.close)
    describe(app)
    return app
