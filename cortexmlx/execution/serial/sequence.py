"""A KVCache of one sequence whose keys and values are in mlx-lm's own caches. No mlx."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from cortexmlx.disk.tier import DiskLoad
from cortexmlx.kv.cache import KVCache
from cortexmlx.kv.pools import BlockPools
from cortexmlx.kv.prefix import Match
from cortexmlx.kv.sizing import sequence_bytes
from cortexmlx.kv.spec import KVSpec, LayerGroup
from cortexmlx.kv.step import BlockCopy

COUNTED = (LayerGroup(KVSpec(0, 0, 0, "float32"), ()),)
"""The one group of its pools. Its blocks take no memory: they only count tokens."""


class OneSequence(KVCache):
    """A `KVCache` for one sequence at a time. Its blocks only count tokens; the keys and values are in mlx-lm's caches.

    Only the last sequence is kept, and a new one that begins like it takes it over. `rewind(tokens)` cuts mlx-lm's
    caches back to the first `tokens` tokens, or returns False if they cannot be cut. Then the new sequence begins
    empty. `rewind(0)` empties the caches. `kept` is what the model's layers keep, and `pools` have the group `COUNTED`.
    """

    def __init__(self, kept: Sequence[LayerGroup], pools: BlockPools, rewind: Callable[[int], bool]) -> None:
        super().__init__(pools)
        self.needs_ends = True  # not all caches can be cut back
        self._kept = tuple(kept)
        self._rewind = rewind

    @property
    def grows(self) -> bool:
        """Always: mlx-lm's caches take memory for every token, though the blocks do not."""
        return True

    @property
    def bytes_limit(self) -> int:
        """Bytes of the longest sequence."""
        return sequence_bytes(self._kept, self.tables.capacity_tokens)

    def allocate_for(
        self,
        seq: int,
        tokens: int,
        headroom: int = 0,
        match: Match | None = None,
        load: DiskLoad | None = None,
        transient: bool = False,
    ) -> tuple[BlockCopy, ...]:
        """Begin a sequence that replaces the last one, with the tokens of `match` that mlx-lm's caches can keep.

        Nothing is copied. Raises KVCacheFull; then the caches have not changed.
        """
        super().allocate_for(seq, tokens, headroom, match)
        self.let_go_sources()  # nothing is copied, and a held source would stay cached after its text is gone
        if not self._rewind(self.tables.length(seq)):
            assert match is not None
            self.free(seq)
            self._rewind(0)
            super().allocate_for(seq, tokens, headroom, replace(match, entries=(), partial=None, partial_tokens=0))
        self.pools.drop_cached()
        return ()
