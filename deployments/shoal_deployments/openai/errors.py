"""Refusals in OpenAI's shape: ``{"error": {"message", "type", "param", "code"}}``.

The status says whose turn it is: 400 to 415 the client's, who has to change the request; 429 and
503 nobody's, the same request may succeed after ``Retry-After``; 500 ours.
"""

from __future__ import annotations

from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from shoal.errors import ConfigError, ShoalError

_LONGEST_VALUE = 80


class ApiError(ShoalError):
    """A request that is not answered: its HTTP status and the four fields of the error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers or {}
        super().__init__(message)

    @property
    def kind(self) -> str:
        """The ``type`` of the error object."""
        if self.status == 401:
            return "authentication_error"
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    def as_object(self) -> dict[str, Any]:
        """The JSON object that the client reads, in a response or as an event of a stream."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


def bad_field(
    param: str, value: object, problem: str, remedy: str, code: str = "invalid_value"
) -> ApiError:
    """Status 400 for one field; ``value`` is shown in short."""
    return ApiError(400, f"{param} = {shown(value)}: {problem}. {remedy}.", param=param, code=code)


def from_config_error(error: ConfigError, param: str | None = None) -> ApiError:
    """Status 400 for what a value object or a tokenizer below this layer refused."""
    return bad_field(param or error.field, error.value, error.problem, error.remedy)


def try_later(status: int, message: str, code: str, after_s: int) -> ApiError:
    """Status 429 or 503 with ``Retry-After``."""
    return ApiError(status, message, code=code, headers={"Retry-After": str(after_s)})


def shown(value: object) -> str:
    """``value`` as it reads in a message: plain ASCII, of bounded length."""
    if isinstance(value, str | bytes):
        value = value[: _LONGEST_VALUE + 1]
    elif isinstance(value, list | tuple | dict) and len(value) > _LONGEST_VALUE:
        return f"a {type(value).__name__} of {len(value)} entries"
    text = ascii(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}…"


def error_response(error: ApiError) -> JSONResponse:
    """The response that carries ``error``."""
    return JSONResponse(error.as_object(), error.status, error.headers)


async def on_http_exception(request: Request, error: Exception) -> JSONResponse:
    """Exception handler for what the router refuses: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    place = f"{request.method} {request.url.path[:_LONGEST_VALUE]}"
    message = {
        404: f"There is no {place}. GET /v1/models, POST /v1/completions and "
        "POST /v1/chat/completions are offered.",
        405: f"{place} is not offered; the header Allow lists the methods of this path.",
    }.get(error.status_code, str(error.detail))
    code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code)
    refusal = ApiError(error.status_code, message, code=code, headers=dict(error.headers or {}))
    return error_response(refusal)


async def on_exception(request: Request, error: Exception) -> JSONResponse:
    """Exception handler for our own mistakes; the server logs the traceback.

    uvicorn ends the connection after one; a client that is not told sends its next request there.
    """
    problem = ApiError(
        500,
        "The server failed to answer.",
        code="internal_error",
        headers={"Connection": "close"},
    )
    return error_response(problem)
