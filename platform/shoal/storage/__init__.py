"""What is on the disk of a checkpoint: files, names, checksums, and the step's publication.

Knows bytes and no tensors, so that the processes that write start in no time.
"""

from shoal.storage.catalog import (
    Step,
    await_saves,
    clean,
    new_token,
    newest,
    prune,
    prune_or_warn,
    step_name,
    steps,
)
from shoal.storage.files import (
    BLOCK_BYTES,
    BlockReader,
    Buffer,
    FileRecord,
    NewFile,
    creating,
    flush_folder,
)
from shoal.storage.job import Abandon, Outcome, Publication, WriteJob
from shoal.storage.manifest import MANIFEST_NAME, Manifest, OptimizerRecord
from shoal.storage.publish import (
    Contents,
    Place,
    prepare,
    publish,
)
from shoal.storage.verify import Damage, block_damages, damage_of, damages, num_threads, verify
from shoal.storage.writer_process import WriterProcess

__all__ = [
    "Abandon",
    "BLOCK_BYTES",
    "BlockReader",
    "Buffer",
    "Contents",
    "Damage",
    "FileRecord",
    "MANIFEST_NAME",
    "Manifest",
    "NewFile",
    "OptimizerRecord",
    "Outcome",
    "Place",
    "Publication",
    "Step",
    "WriteJob",
    "WriterProcess",
    "await_saves",
    "block_damages",
    "clean",
    "creating",
    "damage_of",
    "damages",
    "flush_folder",
    "new_token",
    "newest",
    "num_threads",
    "prepare",
    "prune",
    "prune_or_warn",
    "publish",
    "step_name",
    "steps",
    "verify",
]
