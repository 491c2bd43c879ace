"""Checkpoints: saved whole or not at all, and loaded into any layout."""

from shoal.checkpoint.background import BackgroundSaver
from shoal.checkpoint.direct import DirectSaver
from shoal.checkpoint.export import export, export_megatron, hf_attachments
from shoal.checkpoint.failure import OnFailure, SaveReport
from shoal.checkpoint.load import Loaded, load
from shoal.checkpoint.reshard import reshard
from shoal.checkpoint.rng import capture_rng, restore_rng
from shoal.checkpoint.runfolder import CONFIG_FILE, RunFolder, writing_into
from shoal.checkpoint.save import Saved, save
from shoal.checkpoint.saver import Saver
from shoal.checkpoint.stager import NUM_BUFFERS
from shoal.checkpoint.state import State
from shoal.checkpoint.weights import CheckpointWeights
from shoal.storage import (
    Damage,
    Location,
    Manifest,
    Step,
    clean,
    is_pinned,
    location_of,
    newest,
    pin,
    prune,
    published,
    step_name,
    steps,
    unpin,
    verify,
)

__all__ = [
    "BackgroundSaver",
    "CONFIG_FILE",
    "CheckpointWeights",
    "Damage",
    "DirectSaver",
    "Loaded",
    "Location",
    "Manifest",
    "NUM_BUFFERS",
    "OnFailure",
    "RunFolder",
    "SaveReport",
    "Saved",
    "Saver",
    "State",
    "Step",
    "capture_rng",
    "clean",
    "export",
    "export_megatron",
    "hf_attachments",
    "is_pinned",
    "load",
    "location_of",
    "newest",
    "pin",
    "prune",
    "published",
    "reshard",
    "restore_rng",
    "save",
    "step_name",
    "steps",
    "unpin",
    "verify",
    "writing_into",
]
