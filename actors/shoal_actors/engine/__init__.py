"""An engine as a Ray actor, and a frontend's connection to it."""

from shoal_actors.engine.actor import EngineActor
from shoal_actors.engine.link import STILL_S, EngineLink, LinkState
from shoal_actors.engine.pulse import EngineFacts, Pulse
from shoal_actors.engine.router import Load, Router

__all__ = [
    "EngineActor",
    "EngineFacts",
    "EngineLink",
    "LinkState",
    "Load",
    "Pulse",
    "Router",
    "STILL_S",
]
