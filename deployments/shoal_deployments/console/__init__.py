"""The console: a page that chats with the model and shows the replicas."""

from shoal_deployments.console.page import CONSOLE_PATHS, console_routes

__all__ = ["CONSOLE_PATHS", "console_routes"]
