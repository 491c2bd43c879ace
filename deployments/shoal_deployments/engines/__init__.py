"""The engines behind ``EngineClient``: Ray actors, one link to each, and who waits for what."""

from shoal_deployments.engines.engines import Engines
from shoal_deployments.engines.moving import PATIENCE_S

__all__ = ["Engines", "PATIENCE_S"]
