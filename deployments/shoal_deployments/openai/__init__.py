"""OpenAI's endpoints: bodies, answers, errors, streams."""

from shoal_deployments.openai.errors import ApiError
from shoal_deployments.openai.routes import openai_routes

__all__ = ["ApiError", "openai_routes"]
