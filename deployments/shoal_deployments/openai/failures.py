"""What a failure below this layer means to a client."""

from __future__ import annotations

import logging

from shoal.errors import ConfigError, Overloaded, ShoalError
from shoal_deployments.engine_client import EngineUnavailable
from shoal_deployments.mailbox import SlowReader
from shoal_deployments.openai.errors import ApiError, from_config_error, try_later

logger = logging.getLogger(__name__)


def api_error(error: ShoalError, retry_after_s: int) -> ApiError:
    """The refusal that tells the client about ``error``."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ConfigError):
        return from_config_error(error)
    if isinstance(error, Overloaded):
        return try_later(429, str(error), "queue_full", retry_after_s)
    if isinstance(error, EngineUnavailable):
        return try_later(503, str(error), "engine_unavailable", retry_after_s)
    if isinstance(error, SlowReader):
        return ApiError(408, str(error), code="slow_reader")
    return ApiError(500, str(error), code="engine_failed")


def log_failure(error: ApiError) -> None:
    """Log what went wrong here; the client's mistakes are not the operator's business."""
    if error.status >= 500 or error.code == "slow_reader":
        logger.warning("Status %d: %s", error.status, error.message)
