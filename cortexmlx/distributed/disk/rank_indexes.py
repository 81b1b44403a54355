"""RankIndexes: which pieces all ranks have on their disks, as far as they have told."""

from __future__ import annotations

from collections.abc import Iterable

from cortexmlx.distributed.wire.disk import NAME_BYTES
from cortexmlx.kv.prefix import Key


class RankIndexes:
    """The parts that each of `ranks` ranks has. A piece is there if all of them have their part of it."""

    def __init__(self, ranks: int) -> None:
        self._parts: list[set[bytes]] = [set() for _ in range(ranks)]

    def change(self, rank: int, added: Iterable[Key], removed: Iterable[Key]) -> None:
        """Note which parts a rank has now and had not, and the other way round."""
        self._parts[rank].difference_update(key[:NAME_BYTES] for key in removed)
        self._parts[rank].update(key[:NAME_BYTES] for key in added)

    def __contains__(self, piece: Key) -> bool:
        """Return whether all ranks have their part of a piece."""
        name = piece[:NAME_BYTES]
        return all(name in parts for parts in self._parts)

    def __len__(self) -> int:
        """Return how many pieces all ranks have."""
        return len(set.intersection(*self._parts))
