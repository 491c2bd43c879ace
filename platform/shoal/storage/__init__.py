"""What lies on the medium of a checkpoint: files, names, checksums, and the step's publication.

Knows bytes and no tensors, so that the processes that write start in no time.
"""

from shoal.storage.catalog import (
    Step,
    clean,
    discard,
    is_pinned,
    newest,
    pin,
    prune,
    prune_or_warn,
    published,
    steps,
    unpin,
)
from shoal.storage.files import (
    BLOCK_BYTES,
    Buffer,
    FileRecord,
    NewFile,
    creating,
    reading,
    told,
    unreadable,
)
from shoal.storage.job import Abandon, Outcome, Publication, WriteJob
from shoal.storage.lease import lease
from shoal.storage.local import step_name
from shoal.storage.location import Location, StorePath, location_of, location_of_store
from shoal.storage.manifest import Manifest, OptimizerRecord
from shoal.storage.media import medium_of, read_file
from shoal.storage.medium import MANIFEST_NAME, new_token
from shoal.storage.publish import (
    Contents,
    Place,
    prepare,
    publish,
)
from shoal.storage.verify import Damage, block_damages, damage_of, damages, verify
from shoal.storage.writer_process import WriterProcess

__all__ = [
    "Abandon",
    "BLOCK_BYTES",
    "Buffer",
    "Contents",
    "Damage",
    "FileRecord",
    "Location",
    "MANIFEST_NAME",
    "Manifest",
    "NewFile",
    "OptimizerRecord",
    "Outcome",
    "Place",
    "Publication",
    "Step",
    "StorePath",
    "WriteJob",
    "WriterProcess",
    "block_damages",
    "clean",
    "creating",
    "damage_of",
    "damages",
    "discard",
    "is_pinned",
    "lease",
    "location_of",
    "location_of_store",
    "medium_of",
    "new_token",
    "newest",
    "pin",
    "prepare",
    "prune",
    "prune_or_warn",
    "publish",
    "published",
    "read_file",
    "reading",
    "step_name",
    "steps",
    "told",
    "unpin",
    "unreadable",
    "verify",
]
