"""The pools of all layer groups together: growing, shrinking, pins, and making room by eviction.

Groups that see equally far need equally many blocks at all times, so they have equally many. One that sees a window
needs few of them, whatever the sequences' length.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from cortexmlx.kv.blocks.allocator import KVBlockAllocator
from cortexmlx.kv.blocks.pool import BlockPool
from cortexmlx.kv.prefix import GONE, Entry, Key, Node, PrefixCache
from cortexmlx.kv.spec import Counts, LayerGroup, of_each


class BlockPools:
    """The pools of all groups, which have `blocks` blocks now and may get `max_blocks`, and the prefix cache, whose
    entries have their blocks there.

    `may_resize(blocks)` says whether the arena can follow; once it cannot, what a group has is its limit. What it had
    before all was given back it may ask for again.
    """

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        blocks: int | Sequence[int],
        block_size: int,
        *,
        max_blocks: int | Sequence[int] | None = None,
        prefix: PrefixCache | None = None,
        may_resize: Callable[[Counts], bool] = lambda blocks: True,
    ) -> None:
        self.groups = tuple(groups)
        self.block_size = block_size
        self.blocks = of_each(groups, blocks)
        limits = of_each(groups, self.blocks if max_blocks is None else max_blocks)
        self.max_blocks = tuple(map(max, self.blocks, limits))
        self._given_back: Counts = tuple(0 for _ in groups)
        self.prefix = PrefixCache(block_size) if prefix is None else prefix
        self._may_resize = may_resize
        self._pools = [BlockPool(count) for count in self.blocks]
        attention_windows = [group.spec.attention_window for group in groups]
        self._alike = [
            {g for g, other in enumerate(attention_windows) if other == attention_window}
            for attention_window in attention_windows
        ]
        self._widest = max(range(len(groups)), key=lambda g: attention_windows[g].tokens or float("inf"))

    @property
    def unused_entries(self) -> int:
        """Entries of the prefix cache whose blocks nobody uses or pinned, in the group that sees farthest."""
        pool = self._pools[self._widest]
        return pool.evictable - len(pool.pinned)

    @property
    def block_counts(self) -> tuple[int, int, int]:
        """Used, cached and free blocks as in `CacheStats`, but O(1) however many blocks there are."""
        used = sum(pool.owned for pool in self._pools)
        return used, sum(pool.evictable for pool in self._pools), sum(self.blocks) - used

    @property
    def bytes_in_use(self) -> int:
        """Bytes of the blocks that belong to sequences; cached ones that nobody uses do not count."""
        return sum(p.owned * self.block_size * g.bytes_per_token for p, g in zip(self._pools, self.groups, strict=True))

    @property
    def bytes_limit(self) -> int:
        """Bytes of the blocks that all groups may get."""
        pairs = zip(self.max_blocks, self.groups, strict=True)
        return sum(count * self.block_size * group.bytes_per_token for count, group in pairs)

    def null_block(self, group: int) -> int:
        """The arena's block of zeros, which pads block tables: the first behind those handed out."""
        return self.blocks[group]

    def allocator(self, group: int) -> KVBlockAllocator:
        """The group's allocator."""
        return self._pools[group].allocator

    @property
    def fragmentation(self) -> float:
        """That of the worst group: `1 - longest free run / free blocks`."""
        return max(pool.allocator.fragmentation() for pool in self._pools)

    # -- growing and shrinking ----------------------------------------------------------------------------------------

    def grow(self, blocks: int | Sequence[int]) -> None:
        """Bring the groups to so many blocks each, where that is more. The arena must follow before the next step."""
        for pool, count, have in zip(self._pools, of_each(self.groups, blocks), self.blocks, strict=True):
            if count > have:
                pool.grow(count - have)
        self._count()

    def shrink(self, least: int | Sequence[int]) -> int:
        """Give up free blocks at the end, down to `least` in each group. Returns how many blocks went in all. The arena
        must follow before the next step.
        """
        floors = of_each(self.groups, least)
        ends = [pool.allocator.free_blocks_at_end for pool in self._pools]
        spare = [min(have - n, end) for have, n, end in zip(self.blocks, floors, ends, strict=True)]
        less = [max(0, min(spare[g] for g in alike)) for alike in self._alike]
        if not any(less) or not self._may_resize(tuple(b - n for b, n in zip(self.blocks, less, strict=True))):
            return 0
        for pool, count in zip(self._pools, less, strict=True):
            if count:
                pool.shrink(count)
        self._count()
        return sum(less)

    def stay(self, blocks: Sequence[int]) -> None:
        """The arena could not follow: have its `blocks` blocks, and no more later. Nobody may have any."""
        self.grow(blocks)
        self.shrink(blocks)
        self.max_blocks = self.blocks

    def give_all_back(self) -> None:
        """The arena has no block any more, for memory is short: have as few as can be. Nobody may have any."""
        self._given_back = tuple(map(max, self._given_back, self.blocks))
        self.shrink(1)

    @property
    def grows_back(self) -> bool:
        """It has no more blocks than were given back, so that the arena had as many before."""
        return all(have <= given for have, given in zip(self.blocks, self._given_back, strict=True))

    def expect_back(self) -> None:
        """What was given back may be had again, even if the system has refused it since."""
        self.max_blocks = tuple(map(max, self.max_blocks, self._given_back))

    def _count(self) -> None:
        self.blocks = tuple(len(pool.ref_counts) for pool in self._pools)

    # -- what goes last -----------------------------------------------------------------------------------------------

    def pin(self, group: int, keys: Sequence[Key]) -> None:
        """The blocks of a group that have these keys, or will have them, go after all others."""
        self._pools[group].pins.update(keys)
        self._sort(group, keys)

    def unpin(self, group: int, keys: Sequence[Key]) -> None:
        """Take back as many calls of `pin`."""
        pool = self._pools[group]
        pool.pins -= Counter(keys)
        self._sort(group, keys)

    def _sort(self, group: int, keys: Sequence[Key]) -> None:
        pool = self._pools[group]
        for entry in map(self.prefix.get, reversed(keys)):
            if entry is not None and entry.blocks[group] != GONE and not pool.ref_counts[entry.blocks[group]]:
                pool.hold(entry.blocks[group])
                pool.let_go(entry.blocks[group])

    def pinned_keys(self, group: int) -> set[Key]:
        """The keys of the blocks that go last in a group."""
        return set(self._pools[group].pins)

    @property
    def pinned_blocks(self) -> int:
        """Blocks of all groups that are there and go last."""
        pairs = ((group, self.prefix.get(key)) for group, pool in enumerate(self._pools) for key in pool.pins)
        return sum(entry is not None and entry.blocks[group] != GONE for group, entry in pairs)

    # -- making room --------------------------------------------------------------------------------------------------

    def obtainable(self, group: int) -> int:
        """Blocks that a sequence can count on: free, cached but unused, or not yet grown to."""
        pool = self._pools[group]
        return pool.allocator.free_blocks + pool.evictable + self.max_blocks[group] - self.blocks[group]

    def drop_cached(self, entries: int | None = None) -> int:
        """Evict up to `entries` unused cached blocks of the group that sees farthest, oldest first, with what other
        groups keep of the same tokens; None: all that nobody uses in any group. Returns how many went.
        """
        dropped = 0
        while (entries is None or dropped < entries) and self._evict(self._widest):
            dropped += 1
        for group in range(len(self._pools)) if entries is None else ():
            while self._evict(group):
                dropped += 1
        return dropped

    def _make_room(self, group: int, blocks: int) -> None:
        """See to `blocks` free blocks in a group: evict what was passed, then grow towards the limit, then
        evict what is cached and unused. Raises KVCacheFull.
        """
        pool = self._pools[group]
        allocator = pool.allocator
        if allocator.free_blocks >= blocks:
            return
        while pool.passed and allocator.free_blocks < blocks:
            self._evict(group)
        if allocator.free_blocks < blocks <= self.obtainable(group):
            self._grow_by(group, blocks - allocator.free_blocks)
        if blocks <= allocator.free_blocks + pool.evictable:
            while allocator.free_blocks < blocks and self._evict(group):
                pass
        if allocator.free_blocks < blocks:
            raise pool.full(blocks, self.block_size)

    def _grow_by(self, group: int, least: int) -> None:
        """Grow towards the limit, to twice the size or by `least` blocks; what the system refuses is the limit."""
        have, limit = self.blocks[group], self.max_blocks[group]
        for wanted in (max(2 * have, have + least), have + least):
            grown = tuple(min(wanted, limit) if g in self._alike[group] else n for g, n in enumerate(self.blocks))
            if min(wanted, limit) > have and self._may_resize(grown):
                self.grow(grown)
                return
        self.max_blocks = tuple(have if g in self._alike[group] else n for g, n in enumerate(self.max_blocks))

    def _evict(self, group: int) -> bool:
        """Forget the cached block of a group that nobody has used for the longest time. False if there is none.

        Without the block of a group that sees all tokens, the entry and what follows it are of no use. Without that of
        a window, texts still begin where the window is behind it.
        """
        entry = self._pools[group].next_to_go
        if entry is None:
            return False
        if self.groups[group].spec.attention_window.tokens is None:
            self._remove(entry)
        else:
            self._pools[group].forget(entry.blocks[group])
            entry.blocks = tuple(GONE if g == group else block for g, block in enumerate(entry.blocks))
            self._prune(entry)
        return True

    def _remove(self, entry: Entry) -> None:
        """Forget an entry in all groups."""
        self.prefix.remove(entry)
        self._forgot(entry)
        for pool, block in zip(self._pools, entry.blocks, strict=True):
            if block != GONE:
                pool.forget(block)
        self._prune(entry.parent)

    def _prune(self, node: Node) -> None:
        """Forget the end of a chain, as far as it has no blocks."""
        while isinstance(node, Entry) and set(node.blocks) == {GONE} and not (node.children or node.forgotten):
            self.prefix.remove(node)
            self._forgot(node)
            node = node.parent

    def _forgot(self, entry: Entry) -> None:
        """An entry is forgotten: what else it had goes, too."""
