"""From files to batches: tokenize once, then read sequences in one global order."""

from shoal.data.batch import Batch
from shoal.data.dataset import SequenceDataset
from shoal.data.prepare import plan_sources, prepare
from shoal.data.sample import IGNORED, Sample
from shoal.data.sampler import Sampler, rank_share
from shoal.data.shard import Shard
from shoal.data.spec import DatasetSpec
from shoal.data.tokenize import (
    ShardFunction,
    ShardResult,
    ShardRunner,
    run_locally,
    tokenize_documents,
)
from shoal.data.tokenizer import (
    ByteTokenizer,
    HFTokenizer,
    Tokenizer,
    check_vocabulary,
    load_tokenizer,
    tokenizer_name,
)

__all__ = [
    "Batch",
    "ByteTokenizer",
    "DatasetSpec",
    "HFTokenizer",
    "IGNORED",
    "Sample",
    "Sampler",
    "SequenceDataset",
    "Shard",
    "ShardFunction",
    "ShardResult",
    "ShardRunner",
    "Tokenizer",
    "check_vocabulary",
    "load_tokenizer",
    "plan_sources",
    "prepare",
    "rank_share",
    "run_locally",
    "tokenize_documents",
    "tokenizer_name",
]
