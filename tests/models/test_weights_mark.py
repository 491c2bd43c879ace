"""The mark by which served weights are told from others."""

from __future__ import annotations

import shutil
from pathlib import Path

from shoal.models import weights_mark


def test_weights_are_told_apart_wherever_they_changed(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    content = bytearray(2**18)
    (folder / "model.safetensors").write_bytes(content)
    mark = weights_mark(folder)
    assert weights_mark(shutil.copytree(folder, tmp_path / "copy")) == mark
    for place in (0, 2**17, 2**18 - 1):
        changed = bytearray(content)
        changed[place] = 1
        (folder / "model.safetensors").write_bytes(changed)
        assert weights_mark(folder) != mark
    (folder / "model.safetensors").write_bytes(content)
    (folder / "config.json").write_text("{ }")
    assert weights_mark(folder) != mark
