"""The journal: requests and what was generated for them, on disk, beside the decode loop.

    engine's thread                            journal's thread
       │── begin, add ── Staging ────────────────> │ takes all that waits as one batch,
       │   a few microseconds, whatever            │ appends it to a segment, fsyncs
       │   the disk is at                          │ (again, in a new segment, if that fails)
       │ <─────────── the number of the last batch that is on the disk
       │
    JournaledEngine holds the last output of requests that asked for it until then

``read_journal`` gives the records back, ``read_answers`` what they add up to.
"""

from shoal.inference.journal.journal import Journal, JournalFull, JournalStats
from shoal.inference.journal.journaled_engine import JournaledEngine
from shoal.inference.journal.opening import journal_folder, open_journal
from shoal.inference.journal.reading import RecordedAnswer, read_answers, read_journal
from shoal.inference.journal.records import Began, Grew, Record
from shoal.inference.journal.segments import Segments, Store
from shoal.inference.journal.staging import Batch, Staging

__all__ = [
    "Batch",
    "Began",
    "Grew",
    "Journal",
    "JournalFull",
    "JournalStats",
    "JournaledEngine",
    "Record",
    "RecordedAnswer",
    "Segments",
    "Staging",
    "Store",
    "journal_folder",
    "open_journal",
    "read_answers",
    "read_journal",
]
