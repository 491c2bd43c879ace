"""All that one rank holds of a decoder: one part, or several that other stages lie between."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from shoal.models.decoder import Decoder

EMBEDDING = "model.embed_tokens.weight"
"""Name of the embedding table; of a tied head too."""


class DecoderStage(nn.Module):
    """Parts of one decoder as one module, whose parameters have their names of the whole.

    It is not called: each part is, when its turn comes.
    """

    def __init__(self, parts: Sequence[Decoder]) -> None:
        """``parts`` are of one config, in the order of their layers."""
        super().__init__()
        self.config = parts[0].config
        self.parts: Sequence[Decoder] = nn.ModuleList(parts)  # type: ignore[assignment]

    @property
    def shared_names(self) -> frozenset[str]:
        """Parameters here that a part on another rank holds as well: the table of a tied head."""
        ends = [part.part for part in self.parts if part.part.is_first != part.part.is_last]
        return frozenset({EMBEDDING} if ends and self.config.tie_word_embeddings else ())

    def named_modules(
        self,
        memo: set[nn.Module] | None = None,
        prefix: str = "",
        remove_duplicate: bool = True,
    ) -> Iterator[tuple[str, nn.Module]]:
        """As of ``nn.Module``, with the parts' contents in the place of the parts."""
        memo = set() if memo is None else memo
        yield prefix, self
        for part in self.parts:
            yield from part.named_modules(memo, prefix, remove_duplicate)
