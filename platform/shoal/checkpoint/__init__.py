"""Checkpoints: saved whole or not at all, and loaded into any layout."""

from shoal.checkpoint.background import BackgroundSaver
from shoal.checkpoint.export import export, export_megatron, hf_attachments
from shoal.checkpoint.failure import OnFailure, SaveReport
from shoal.checkpoint.load import Loaded, load
from shoal.checkpoint.reshard import reshard
from shoal.checkpoint.rng import capture_rng, restore_rng
from shoal.checkpoint.runfolder import RunFolder
from shoal.checkpoint.save import Saved, save
from shoal.checkpoint.saver import DirectSaver, Saver
from shoal.checkpoint.weights import CheckpointWeights
from shoal.storage import (
    Damage,
    Manifest,
    Step,
    await_saves,
    clean,
    newest,
    prune,
    step_name,
    steps,
    verify,
)

__all__ = [
    "BackgroundSaver",
    "CheckpointWeights",
    "Damage",
    "DirectSaver",
    "Loaded",
    "Manifest",
    "OnFailure",
    "RunFolder",
    "SaveReport",
    "Saved",
    "Saver",
    "Step",
    "await_saves",
    "capture_rng",
    "clean",
    "export",
    "export_megatron",
    "hf_attachments",
    "load",
    "newest",
    "prune",
    "reshard",
    "restore_rng",
    "save",
    "step_name",
    "steps",
    "verify",
]
