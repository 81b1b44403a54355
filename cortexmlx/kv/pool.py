"""The blocks of one layer group: which are free, how many sequences own each block, and which are only cached."""

from __future__ import annotations

from collections import Counter, OrderedDict

import numpy as np

from cortexmlx.errors import KVCacheFull
from cortexmlx.kv.allocator import KVBlockAllocator, KVHandle
from cortexmlx.kv.prefix import Entry, Key
from cortexmlx.kv.table import BlockTable, runs_of


class BlockPool:
    """The blocks of one layer group: an allocator, and a reference count per block in `ref_counts`, `[blocks]` int32.

    A block without owners is either free or cached. The allocator counts a cached block as used. Unowned cached blocks
    wait in one of five queues, and the first block of the first queue that is not empty is evicted next:

    - `passed`: blocks that a window has passed while their sequence continues, and blocks of text that a row has
      dropped;
    - `transient`: blocks that only transient sequences have used;
    - `unused`: other blocks, the least recently used first;
    - `needed`: blocks that a resume point of a window needs, by `points`: see `WindowPoints`. One can only be evicted
      when no point needs it any more;
    - `pinned`: blocks whose keys are in `pins`.

    A block that is the source of a copy is in `sources`, with whether it was `passed`. It is in no queue until
    `let_go_source`.
    """

    __slots__ = (
        *("allocator", "cached", "needed", "passed", "pinned", "pins", "points", "ref_counts", "sources", "transient"),
        "unused",
    )

    def __init__(self, blocks: int) -> None:
        self.allocator = KVBlockAllocator(blocks)
        self.ref_counts = np.zeros(blocks, np.int32)
        self.cached: dict[int, Entry] = {}
        self.passed: OrderedDict[int, Entry] = OrderedDict()
        self.transient: OrderedDict[int, Entry] = OrderedDict()
        self.unused: OrderedDict[int, Entry] = OrderedDict()
        self.needed: OrderedDict[int, Entry] = OrderedDict()
        self.pinned: OrderedDict[int, Entry] = OrderedDict()
        self.pins: Counter[Key] = Counter()
        self.points: Counter[Entry] = Counter()
        self.sources: dict[int, bool] = {}

    @property
    def evictable(self) -> int:
        """Cached blocks without owners."""
        return sum(map(len, self.queues))

    @property
    def queues(self) -> tuple[OrderedDict[int, Entry], ...]:
        """The blocks that wait to be evicted, in the order of the queues."""
        return self.passed, self.transient, self.unused, self.needed, self.pinned

    @property
    def next_to_go(self) -> Entry | None:
        """The entry whose block would be evicted next; None if no block can be evicted. No resume point may be all that
        keeps the others.
        """
        return next(iter((self.passed or self.transient or self.unused or self.pinned).values()), None)

    @property
    def owned(self) -> int:
        """Blocks that belong to at least one sequence."""
        return self.allocator.used_blocks - self.evictable

    def share(self, table: BlockTable, block: int) -> None:
        """Give a cached or owned block one more owner, at the end of the owner's table."""
        self.ref_counts[block] += 1
        self.hold(block)
        table.blocks.append(block)

    def hold(self, block: int) -> bool:
        """Keep a cached block from being evicted. Return whether it was in `passed`."""
        for waiting in (self.unused, self.needed, self.pinned, self.transient):
            waiting.pop(block, None)
        return self.passed.pop(block, None) is not None

    def let_go(self, block: int, passed: bool = False) -> None:
        """Let a held block be evicted again if it has no owner, after the blocks that are in its queue already."""
        if not self.ref_counts[block]:
            self._wait(block, self.passed if passed else self.unused)

    def hold_source(self, block: int) -> bool:
        """Keep a cached block unchanged until `let_go_source`, also when its owners give it up. Return False if it is
        held already.
        """
        if block in self.sources:
            return False
        self.sources[block] = self.hold(block)
        return True

    def let_go_source(self, block: int) -> None:
        """Let the source of a copy be evicted again: the end of `hold_source`."""
        self.let_go(block, self.sources.pop(block))

    def _wait(self, block: int, waiting: OrderedDict[int, Entry]) -> None:
        if block in self.sources:
            return
        entry = self.cached[block]
        if entry.key in self.pins:
            waiting = self.pinned
        elif entry.transient:
            waiting = self.transient
        elif entry in self.points:
            waiting = self.needed
        waiting[block] = entry

    def need(self, entry: Entry, block: int) -> None:
        """Keep an entry's block for one more resume point."""
        self.points[entry] += 1
        if self.points[entry] == 1 and not self.ref_counts[block] and self.cached.get(block) is entry:
            self.hold(block)
            self.let_go(block)

    def need_no_more(self, entry: Entry, block: int) -> None:
        """Keep an entry's block for one resume point less. If no other needs it, it is evicted before all others."""
        self.points[entry] -= 1
        if not self.points[entry]:
            del self.points[entry]
            if self.needed.get(block) is entry:
                del self.needed[block]
                self.passed[block] = entry

    def extend(self, table: BlockTable, need: int, want: int) -> None:
        """Extend a table to the end `need`, or to `want` if the run that holds the last needed block holds the others,
        too.

        The table's last run grows in place where it can; otherwise runs are added. `need` blocks more than the table
        has must be free.
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
        """Take one owner from each of `blocks`, which are a sequence's blocks in its order. Return how many blocks
        became free.

        A block without owners is free, or waits to be evicted if it is cached. The last block waits first, so that ends
        of texts are evicted before beginnings. `passed` says that the sequence continues without these blocks; then the
        first one waits first.
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
        """Stop caching a block. It becomes free if it has no owner."""
        self.hold(block)
        del self.cached[block]
        if not self.ref_counts[block]:
            self.allocator.free(KVHandle(block, 1))

    def full(self, blocks: int, block_size: int) -> KVCacheFull:
        """Return the error for a caller who needs `blocks` more blocks."""
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
        """Drop the last `less` blocks, which must be free."""
        self.allocator.shrink(less)
        self.ref_counts = self.ref_counts[:-less].copy()

    def list_free(self) -> list[int]:
        """Return the numbers of the free blocks."""
        return [b for run in self.allocator.free_runs() for b in range(run.start, run.stop)]

    def compact(self) -> dict[int, int]:
        """Renumber the used blocks from 0, in their order. Return the new number of each."""
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
        self.passed, self.transient, self.unused, self.needed, self.pinned = (
            OrderedDict((moved[b], entry) for b, entry in queue.items()) for queue in self.queues
        )
        return moved
