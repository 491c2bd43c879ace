"""Names of what stands above the platform, resolved as text when a command runs."""

from __future__ import annotations

import importlib
from typing import Any

from shoal.errors import WorkError


def resolve(name: str) -> Any:
    """What ``package.module:attribute`` names.

    Raises:
        WorkError: where this installation lacks the package.
    """
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise
        package = module_name.partition(".")[0]
        raise WorkError(
            f"This command needs the package {package}: install all of Shoal."
        ) from error
    return getattr(module, attribute)
