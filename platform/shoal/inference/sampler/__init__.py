"""From logits to tokens: row by row, whoever else is in the batch.

``Sampler(vocab_size, end_ids)``, then ``sample(logits, rows) -> list[Sampled]`` for the rows that
give a token and ``score(logits, tokens, num_top) -> list[Scored]`` for rows of a prompt.
"""

from shoal.inference.sampler.row import Row, Sampled, Scored
from shoal.inference.sampler.sampler import Sampler

__all__ = ["Row", "Sampled", "Sampler", "Scored"]
