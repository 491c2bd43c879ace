"""Imports run down only; the contracts stand in pyproject.toml."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

# A process of its own: the linter switches off every logger that it finds.
_LINT = """
import sys
from importlinter.cli import lint_imports
sys.exit(lint_imports(config_filename="pyproject.toml", no_cache=True, no_logo=True))
"""


def test_imports_keep_the_contracts() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _LINT], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
