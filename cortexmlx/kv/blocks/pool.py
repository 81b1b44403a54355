"""The blocks of one layer group: which are free, how many sequences own each other one, which are only cached."""

from __future__ import annotations

from collections import Counter, OrderedDict

import numpy as np

from cortexmlx.errors import KVCacheFull
from cortexmlx.kv.blocks.allocator import KVBlockAllocator, KVHandle
from cortexmlx.kv.blocks.table import BlockTable, runs_of
from cortexmlx.kv.prefix import Entry, Key


class BlockPool:
    """The blocks of one group: an allocator and a reference count per block, `ref_counts` `[blocks]` int32.

    A block without owners is free, or one of those `cached` in an entry of the prefix cache, which the allocator still
    counts as used. The latter wait to go, the next one first: in `passed` if they were behind a running sequence's
    window when they lost their last owner, or in a text of which it keeps a part, else in `unused`; in `pinned`, which
    go after all others, if their key is among the `pins`. A block that is the source of a copy is in `sources`, with
    whether it was `passed`, and waits nowhere until the copies are let go.
    """

    __slots__ = ("allocator", "cached", "passed", "pinned", "pins", "ref_counts", "sources", "unused")

    def __init__(self, blocks: int) -> None:
        self.allocator = KVBlockAllocator(blocks)
        self.ref_counts = np.zeros(blocks, np.int32)
        self.cached: dict[int, Entry] = {}
        self.passed: OrderedDict[int, Entry] = OrderedDict()
        self.unused: OrderedDict[int, Entry] = OrderedDict()
        self.pinned: OrderedDict[int, Entry] = OrderedDict()
        self.pins: Counter[Key] = Counter()
        self.sources: dict[int, bool] = {}

    @property
    def evictable(self) -> int:
        """Cached blocks without owners."""
        return len(self.passed) + len(self.unused) + len(self.pinned)

    @property
    def next_to_go(self) -> Entry | None:
        """The entry whose block here would be evicted first."""
        return next(iter((self.passed or self.unused or self.pinned).values()), None)

    @property
    def owned(self) -> int:
        """Blocks that have owners."""
        return self.allocator.used_blocks - self.evictable

    def share(self, table: BlockTable, block: int) -> None:
        """One owner more for a block that holds something, at the end of the owner's table."""
        self.ref_counts[block] += 1
        self.hold(block)
        table.blocks.append(block)

    def hold(self, block: int) -> bool:
        """A cached block must not be evicted. Returns whether it was `passed`."""
        for waiting in (self.unused, self.pinned):
            waiting.pop(block, None)
        return self.passed.pop(block, None) is not None

    def let_go(self, block: int, passed: bool = False) -> None:
        """The opposite: it may be evicted, if nobody owns it, after those of which that was said before."""
        if not self.ref_counts[block]:
            self._wait(block, self.passed if passed else self.unused)

    def hold_source(self, block: int) -> bool:
        """Keep a cached block as it is until `let_go_source`, whoever gives it up. False if it is held already."""
        if block in self.sources:
            return False
        self.sources[block] = self.hold(block)
        return True

    def let_go_source(self, block: int) -> None:
        """End what `hold_source` began."""
        self.let_go(block, self.sources.pop(block))

    def _wait(self, block: int, waiting: OrderedDict[int, Entry]) -> None:
        if block in self.sources:
            return
        entry = self.cached[block]
        (self.pinned if entry.key in self.pins else waiting)[block] = entry

    def extend(self, table: BlockTable, need: int, want: int) -> None:
        """Bring a table to its first `need` places, or `want` if the last run that is needed holds the others, too: the
        table's last run grows in place where it can, or runs are added. As many blocks as are needed must be free.
        """
        have = table.end
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
            have = table.end

    def give_up(self, blocks: list[int], passed: bool = False) -> int:
        """One owner less for each of some blocks of a sequence, in its order. Those that have none left are free, or
        if they are cached, wait to be evicted: the last of them first, so that ends of texts go before beginnings.
        `passed` says that the sequence goes on, but does not see them any more. Returns how many are free now.
        """
        if not blocks:
            return 0
        self.ref_counts[blocks] -= 1
        orphans = [b for b in blocks if not self.ref_counts[b]]
        free = [b for b in orphans if b not in self.cached]
        for run in runs_of(free):
            self.allocator.free(run)
        waiting = self.passed if passed else self.unused
        for block in orphans if passed else reversed(orphans):
            if block in self.cached:
                self._wait(block, waiting)
        return len(free)

    def forget(self, block: int) -> None:
        """A block is no longer cached: free, if nobody owns it."""
        self.hold(block)
        del self.cached[block]
        if not self.ref_counts[block]:
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
        moved = {old: new for new, old in enumerate(kept)}
        self.cached = {moved[b]: entry for b, entry in self.cached.items()}
        self.passed = OrderedDict((moved[b], entry) for b, entry in self.passed.items())
        self.unused = OrderedDict((moved[b], entry) for b, entry in self.unused.items())
        self.pinned = OrderedDict((moved[b], entry) for b, entry in self.pinned.items())
        return moved
