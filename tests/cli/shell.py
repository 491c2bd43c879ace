"""Runs the real command, in a process of its own or in this one."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

from shoal.cli import main


def shoal(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """What ``python -m shoal`` printed and how it ended."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "shoal", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def shoal_here(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The same in this process, where torch is loaded already."""
    before = Path.cwd()
    handlers = logging.root.handlers[:]
    out, err = io.StringIO(), io.StringIO()
    code: object = 0
    with (
        mock.patch.object(sys, "argv", ["shoal", *arguments]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        os.chdir(cwd)
        logging.root.handlers.clear()
        try:
            main()
        except SystemExit as end:
            code = end.code
        finally:
            os.chdir(before)
            logging.root.handlers[:] = handlers
    assert isinstance(code, int)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def complaints(result: subprocess.CompletedProcess[str]) -> list[str]:
    """The lines on stderr but for those that say what is done before anything is shown."""
    lines: list[str] = result.stderr.splitlines()
    return [line for line in lines if not line.startswith(("Loading ", "compiling the kernels"))]


def write_config(folder: Path, **extra: str) -> Path:
    """A small valid configuration, with more top-level keys as YAML text."""
    (folder / "corpus").write_text("A few words.", encoding="utf-8")
    path = folder / "run.yaml"
    lines = [
        "model: {config: {model_type: llama, vocab_size: 257, hidden_size: 32,",
        "  intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 2,",
        "  max_position_embeddings: 64}}",
        "data: {sources: [{path: corpus}], seq_len: 16}",
        "train: {steps: 4}",
        "precision: {compute: fp32}",
        *(f"{key}: {value}" for key, value in extra.items()),
    ]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path
