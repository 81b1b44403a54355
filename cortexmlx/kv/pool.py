"""The blocks of one layer group: which are free, and how many sequences own each of the others."""

from __future__ import annotations

import numpy as np

from cortexmlx.errors import KVCacheFull
from cortexmlx.kv.allocator import KVBlockAllocator, KVHandle
from cortexmlx.kv.table import BlockTable, runs_of


class BlockPool:
    """An allocator and a reference count per block, `ref_counts` `[blocks]` int32.

    A block without owners is free, or cached: then the allocator still counts it as used, until `free_cached`.
    """

    __slots__ = ("allocator", "ref_counts")

    def __init__(self, blocks: int) -> None:
        self.allocator = KVBlockAllocator(blocks)
        self.ref_counts = np.zeros(blocks, np.int32)

    def share(self, table: BlockTable, block: int) -> None:
        """One owner more for a block that holds something, at the end of the owner's table."""
        self.ref_counts[block] += 1
        table.blocks.append(block)

    def extend(self, table: BlockTable, need: int, want: int) -> None:
        """Bring a table to `need` blocks, or to `want` if the last run that is needed holds the others, too: the
        table's last run grows in place where it can, or runs are added. As many blocks as are needed must be free.
        """
        have = len(table.blocks)
        while have < need:
            added: KVHandle | None = None
            counts = tuple(dict.fromkeys((want - have, need - have)))
            for count in counts if table.blocks else ():
                grown = self.allocator.extend(KVHandle(table.blocks[-1], 1), count)
                if grown is not None:
                    added = KVHandle(grown.start + 1, count)
                    break
            if added is None:
                longest = self.allocator.largest_free_run
                added = self.allocator.allocate(next((c for c in counts if c <= longest), longest))
            self.ref_counts[added.start : added.start + added.count] = 1
            table.blocks.extend(range(added.start, added.start + added.count))
            have = len(table.blocks)

    def decref(self, blocks: list[int]) -> None:
        """One owner less for each of some cached blocks: without owners they stay, until they are evicted."""
        self.ref_counts[blocks] -= 1

    def decref_and_free(self, blocks: list[int]) -> int:
        """One owner less for each of some uncached blocks; free those that have none left. Returns how many were
        freed.
        """
        if not blocks:
            return 0
        self.ref_counts[blocks] -= 1
        orphans = [b for b in blocks if self.ref_counts[b] == 0]
        for run in runs_of(orphans):
            self.allocator.free(run)
        return len(orphans)

    def free_cached(self, block: int) -> None:
        """Free a block that nobody owns and that is no longer cached."""
        self.allocator.free(KVHandle(block, 1))

    def full(self, blocks: int, block_size: int) -> KVCacheFull:
        """What to tell whoever needs so many more blocks."""
        return KVCacheFull(
            f"the KV cache is full: {blocks} more blocks of {block_size} tokens are needed, "
            f"{self.allocator.free_blocks} of {self.allocator.total_blocks} are free; "
            "raise the KV memory (--kv-memory) or run fewer requests at once"
        )

    def grow(self, more: int) -> None:
        """Add `more` free blocks at the end."""
        self.allocator.grow(more)
        self.ref_counts = np.concatenate([self.ref_counts, np.zeros(more, np.int32)])

    def shrink(self, less: int) -> None:
        """Give up the last `less` blocks, which must be free."""
        self.allocator.shrink(less)
        self.ref_counts = self.ref_counts[:-less].copy()

    def list_free(self) -> list[int]:
        """The numbers of the blocks that are free."""
        return [b for run in self.allocator.free_runs() for b in range(run.start, run.stop)]

    def compact(self) -> dict[int, int]:
        """Renumber the blocks that hold something from 0, in their order. Returns the new number of each."""
        blocks, free = len(self.ref_counts), set(self.list_free())
        kept = [b for b in range(blocks) if b not in free]
        counts = np.zeros(blocks, np.int32)
        counts[: len(kept)] = self.ref_counts[kept]
        self.ref_counts = counts
        self.allocator = KVBlockAllocator(blocks)
        if kept:
            self.allocator.allocate(len(kept))
        return {old: new for new, old in enumerate(kept)}
