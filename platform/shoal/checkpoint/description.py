"""What all ranks' files look like: told when a layout is new, and kept for the saves after it."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.checkpoint.contents import Part, contents_of
from shoal.checkpoint.peers import Peers
from shoal.checkpoint.shard import Layout, lay_out, layout_key
from shoal.checkpoint.snapshot import Snapshot
from shoal.storage import Contents


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """This rank's file and, on the first rank, what it must know of all files."""

    key: tuple[object, ...]
    """Equal for states whose files differ in values alone."""

    layout: Layout

    names: tuple[str, ...] = ()
    """Files of all ranks."""

    num_bytes: int = 0
    """Of all ranks."""

    contents: Contents | None = None
    """What comes beside them; unset on other ranks than the first."""

    @classmethod
    def of(cls, snapshot: Snapshot, rank: int, known: Description | None) -> Description:
        """``known``, where it fits, or one that the others have yet to be told of."""
        key = (
            *layout_key(snapshot.entries, snapshot.blobs),
            snapshot.optimizer_kind,
            snapshot.stateless,
        )
        if known is not None and key == known.key:
            return known
        return cls(key=key, layout=lay_out(rank, snapshot.entries, snapshot.blobs))

    def told(self, deed: str, snapshot: Snapshot, peers: Peers) -> Description:
        """Tell the first rank of it, which describes all of them; or every rank raises."""
        parts = peers.gather(deed, Part.of(self.layout, snapshot))

        def describe() -> Description:
            return Description(
                key=self.key,
                layout=self.layout,
                names=tuple(part.shard.name for part in parts),
                num_bytes=sum(part.shard.num_bytes for part in parts),
                contents=contents_of(parts) if parts else None,
            )

        return peers.each(deed, describe)
