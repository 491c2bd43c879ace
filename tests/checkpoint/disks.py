"""File systems of their own for tests of disks that refuse; only root can mount any."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(disk: Path, *mount: str) -> Iterator[Path]:
    """What ``mount`` mounts there."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system")
    disk.mkdir()
    if not _succeeds("mount", *mount, str(disk)):
        pytest.skip("no file system can be mounted here")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


@contextmanager
def device(image: Path | str, mount: Path, *options: str) -> Iterator[None]:
    """An ext4 file system in ``image``, by a loop device."""
    if os.geteuid() != 0:
        pytest.skip("only root can make a block device")
    mount.mkdir()
    make = ["mkfs.ext4", "-q", "-F", "-O", "^has_journal", str(image)]
    attach = ["losetup", "--find", "--show", *options, str(image)]
    try:
        subprocess.run(make, capture_output=True, check=True)
        device = subprocess.run(attach, capture_output=True, check=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no file system can be made on a loop device here")
    try:
        if not _succeeds("mount", device, str(mount)):
            pytest.skip("no file system can be mounted here")
        try:
            yield
        finally:
            subprocess.run(["umount", "--lazy", str(mount)], check=True)
    finally:
        subprocess.run(["losetup", "--detach", device], check=True)


@contextmanager
def frozen(disk: Path) -> Iterator[None]:
    """A mounted device on which all who write wait, whatever signal comes, until the block ends."""
    if not _succeeds("fsfreeze", "--freeze", str(disk)):
        pytest.skip("no file system can be frozen here")
    try:
        yield
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", str(disk)], check=True)


def _succeeds(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:  # it is not installed
        return False
