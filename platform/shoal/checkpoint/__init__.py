"""Checkpoints: saved whole or not at all, and loaded into any layout."""

from shoal.checkpoint.catalog import Step, clean, newest, prune, step_name, steps
from shoal.checkpoint.export import export, export_megatron, hf_attachments
from shoal.checkpoint.load import Loaded, load
from shoal.checkpoint.manifest import Manifest
from shoal.checkpoint.rng import capture_rng, restore_rng
from shoal.checkpoint.runfolder import RunFolder
from shoal.checkpoint.save import Saved, save
from shoal.checkpoint.verify import Damage, verify
from shoal.checkpoint.weights import CheckpointWeights

__all__ = [
    "CheckpointWeights",
    "Damage",
    "Loaded",
    "Manifest",
    "RunFolder",
    "Saved",
    "Step",
    "capture_rng",
    "clean",
    "export",
    "export_megatron",
    "hf_attachments",
    "load",
    "newest",
    "prune",
    "restore_rng",
    "save",
    "step_name",
    "steps",
    "verify",
]
