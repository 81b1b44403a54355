"""The block pools of all layer groups together: growing, shrinking, pins, and making room by eviction.

Groups that see equally far always need equally many blocks, so they have equally many. A group that sees a window needs
few blocks, however long the sequences are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from cortexmlx.kv.invariants import block_map
from cortexmlx.kv.pool import BlockPool
from cortexmlx.kv.prefix import GONE, Entry, Key, Node, PrefixCache
from cortexmlx.kv.snapshots import Snapshots
from cortexmlx.kv.spec import Counts, LayerGroup, of_each
from cortexmlx.kv.window_points import WindowPoints
from cortexmlx.stats import BlockMap


class BlockPools:
    """One pool of blocks per layer group, and the prefix cache whose entries have their blocks in these pools.

    An entry that is evicted loses its snapshots of recurrent states, too. Iterating gives the pools in the order of
    the groups.
    """

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        blocks: int | Sequence[int],
        block_size: int,
        *,
        max_blocks: int | Sequence[int] | None = None,
        prefix: PrefixCache | None = None,
        snapshots: Snapshots | None = None,
        may_resize: Callable[[Counts], bool] = lambda blocks: True,
    ) -> None:
        """Begin with `blocks` blocks in each group, one number for all groups or one for each, all of them free.

        The pools grow on demand up to `max_blocks`. `may_resize(blocks)` says whether the arena can get these numbers
        of blocks. If it cannot, what a group has becomes its limit, until `ask_again`.
        """
        self.groups = tuple(groups)
        self.block_size = block_size
        self.blocks = of_each(groups, blocks)
        limits = of_each(groups, self.blocks if max_blocks is None else max_blocks)
        self.configured_blocks: Counts = tuple(map(max, self.blocks, limits))
        """How many blocks each group may have if the system gives the memory."""
        self.max_blocks = self.configured_blocks
        """How many it may have now: less after the system has refused more."""
        self.prefix = PrefixCache(block_size) if prefix is None else prefix
        self.snapshots = snapshots
        self.spare: Counts = tuple(0 for _ in groups)
        """Blocks of each group, within its limit, in which nothing is kept for chats: see `keep_spare`."""
        self._given_back: Counts = tuple(0 for _ in groups)
        self._look_suffices = True
        self._may_resize = may_resize
        self._pools = [BlockPool(count) for count in self.blocks]
        self.points = WindowPoints(groups, self._pools, block_size)
        windows = [group.spec.attention_window for group in groups]
        self._alike = [{g for g, other in enumerate(windows) if other == window} for window in windows]
        self._widest = max(range(len(groups)), key=lambda g: windows[g].tokens or float("inf"))

    def __iter__(self) -> Iterator[BlockPool]:
        return iter(self._pools)

    def __getitem__(self, group: int) -> BlockPool:
        return self._pools[group]

    @property
    def unused_entries(self) -> int:
        """Cached entries that no sequence uses and no pin names, counted in the group that sees the most tokens."""
        pool = self._pools[self._widest]
        return pool.evictable - len(pool.pinned)

    @property
    def block_counts(self) -> tuple[int, int, int]:
        """Used, cached and free blocks as in `CacheStats`, in a time that does not depend on their number."""
        used = sum(pool.owned for pool in self._pools)
        return used, sum(pool.evictable for pool in self._pools), sum(self.blocks) - used

    @property
    def bytes_in_use(self) -> int:
        """Bytes of the blocks that belong to sequences. Cached blocks that no sequence uses do not count."""
        return sum(p.owned * self.block_size * g.bytes_per_token for p, g in zip(self._pools, self.groups, strict=True))

    @property
    def bytes_limit(self) -> int:
        """Bytes of the blocks of all groups at their limits."""
        pairs = zip(self.max_blocks, self.groups, strict=True)
        return sum(count * self.block_size * group.bytes_per_token for count, group in pairs)

    @property
    def fragmentation(self) -> float:
        """`1 - longest free run / free blocks` of the group in which it is largest."""
        return max(pool.allocator.fragmentation() for pool in self._pools)

    def null_block(self, group: int) -> int:
        """Return the arena's block of zeros, which pads block tables: the first one after the blocks of a group."""
        return self.blocks[group]

    def block_map(self) -> BlockMap:
        """Return the state of every block."""
        return block_map(self.block_size, self.groups, self._pools, self.max_blocks)

    # -- growing and shrinking ----------------------------------------------------------------------------------------

    def grow(self, blocks: int | Sequence[int]) -> None:
        """Grow each group to `blocks` blocks if it has fewer. The arena must be resized before the next step."""
        for pool, count, have in zip(self._pools, of_each(self.groups, blocks), self.blocks, strict=True):
            if count > have:
                pool.grow(count - have)
        self._count()

    def shrink(self, least: int | Sequence[int]) -> int:
        """Give up free blocks at the end of each group, down to `least` blocks. Return how many were given up in all.

        The arena must be resized before the next step.
        """
        floors = of_each(self.groups, least)
        ends = [pool.allocator.free_blocks_at_end for pool in self._pools]
        spare = [min(have - n, end) for have, n, end in zip(self.blocks, floors, ends, strict=True)]
        less = [max(0, min(spare[g] for g in alike)) for alike in self._alike]
        if not any(less) or not self._may_resize(tuple(b - n for b, n in zip(self.blocks, less, strict=True))):
            return 0
        self._shrink_by(less)
        return sum(less)

    def stay(self, blocks: Sequence[int]) -> None:
        """Keep the arena's `blocks` blocks as the limit, because it could not grow. No sequence may have blocks."""
        self.grow(blocks)
        self._shrink_by([have - count for have, count in zip(self.blocks, blocks, strict=True)])
        self.max_blocks = self.blocks
        self._look_suffices = False

    def give_all_back(self) -> None:
        """Shrink to one block in each group, after the arena was given back. No sequence may have blocks."""
        self.note_given_back()
        self._shrink_by([have - 1 for have in self.blocks])

    def note_given_back(self) -> None:
        """Note that the arena has all of these blocks, and gives some of them back because memory is short."""
        self._given_back = tuple(map(max, self._given_back, self.blocks))

    @property
    def grows_back(self) -> bool:
        """Whether the pools have no more blocks than were given back, so that the arena once had as many."""
        return all(have <= given for have, given in zip(self.blocks, self._given_back, strict=True))

    def ask_again(self) -> None:
        """Allow growth to the configured blocks again, even if the system has refused it since: memory may be free by
        now.
        """
        self.max_blocks = self.configured_blocks
        self._look_suffices = True

    def look_again(self) -> None:
        """`ask_again` if that costs nothing: since the last time, `may_resize` has known of each refusal in advance."""
        if self._look_suffices:
            self.ask_again()

    def _shrink_by(self, less: Sequence[int]) -> None:
        """Take so many blocks from the end of each group. All of them must be free."""
        for pool, count in zip(self._pools, less, strict=True):
            if count:
                pool.shrink(count)
        self._count()

    def _count(self) -> None:
        self.blocks = tuple(len(pool.ref_counts) for pool in self._pools)

    # -- pins ---------------------------------------------------------------------------------------------------------

    def pin(self, group: int, keys: Sequence[Key]) -> None:
        """Evict the blocks of a group that have these keys, or will have them, after all others."""
        self._pools[group].pins.update(keys)
        self._sort(group, keys)

    def unpin(self, group: int, keys: Sequence[Key]) -> None:
        """Undo one `pin` of these keys."""
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
        """Return the keys that are pinned in a group."""
        return set(self._pools[group].pins)

    @property
    def pinned_blocks(self) -> int:
        """Pinned blocks of all groups that are cached now."""
        pairs = ((group, self.prefix.get(key)) for group, pool in enumerate(self._pools) for key in pool.pins)
        return sum(entry is not None and entry.blocks[group] != GONE for group, entry in pairs)

    # -- making room --------------------------------------------------------------------------------------------------

    def obtainable(self, group: int, transient: bool = False) -> int:
        """Return how many blocks of a group a sequence can get: free, cached but unused, or not yet grown to. If it is
        transient, it evicts only what transient sequences have cached.
        """
        pool = self._pools[group]
        evictable = len(pool.transient) if transient else pool.evictable
        return pool.allocator.free_blocks + evictable + self.max_blocks[group] - self.blocks[group]

    def keep_spare(self) -> None:
        """Evict what chats have cached, the least recently used first and pinned blocks never, until as much room as
        `spare` says is left for transient sequences, beside the blocks that have owners.
        """
        for group, (pool, spare) in enumerate(zip(self._pools, self.spare, strict=True)):
            while spare and pool.evictable - len(pool.transient) > self.max_blocks[group] - spare:
                if not pool.passed and not pool.unused:
                    self.points.give_way(group)
                entry = next(iter((pool.passed or pool.unused).values()), None)
                if entry is None:
                    break
                self._evict_entry(group, entry)

    def keep_for_chats(self, entry: Entry) -> None:
        """Keep an entry as those that chats have cached, because a sequence uses it that is not transient."""
        if entry.transient:
            entry.transient = False
            for pool, block in zip(self._pools, entry.blocks, strict=True):
                if block in pool.transient:
                    pool.hold(block)
                    pool.let_go(block)

    def drop_cached(self, entries: int | None = None) -> int:
        """Evict unused cached blocks, the least recently used first. Return how many were evicted.

        `entries` is the most blocks to evict in the group that sees the most tokens. Blocks of the same tokens in other
        groups go with them. None evicts all unused blocks of all groups.
        """
        dropped = 0
        while (entries is None or dropped < entries) and self._evict(self._widest):
            dropped += 1
        for group in range(len(self._pools)) if entries is None else ():
            while self._evict(group):
                dropped += 1
        return dropped

    def make_room(self, group: int, blocks: int, transient: bool = False) -> None:
        """Make `blocks` blocks of a group free. First evict blocks that windows have passed, then grow towards the
        limit, then evict other unused cached blocks. For a `transient` sequence evict nothing but what such sequences
        have cached. Raises KVCacheFull.
        """
        pool = self._pools[group]
        allocator = pool.allocator
        if allocator.free_blocks >= blocks:
            return
        while pool.passed and not transient and allocator.free_blocks < blocks:
            self._evict(group)
        if allocator.free_blocks < blocks <= self.obtainable(group, transient):
            self._grow_by(group, blocks - allocator.free_blocks)
        if blocks <= allocator.free_blocks + (len(pool.transient) if transient else pool.evictable):
            while allocator.free_blocks < blocks and self._evict(group, transient):
                pass
        if allocator.free_blocks < blocks:
            raise pool.full(blocks, self.block_size)

    def _grow_by(self, group: int, least: int) -> None:
        """Grow to twice the size, or else by `least` blocks, within the limit.

        If the system refuses both, lower the limit to what the group has.
        """
        have, limit = self.blocks[group], self.max_blocks[group]
        for wanted in (max(2 * have, have + least), have + least):
            grown = tuple(min(wanted, limit) if g in self._alike[group] else n for g, n in enumerate(self.blocks))
            if min(wanted, limit) > have and self._may_resize(grown):
                self.grow(grown)
                return
        self.max_blocks = tuple(have if g in self._alike[group] else n for g, n in enumerate(self.max_blocks))

    def _evict(self, group: int, transient: bool = False) -> bool:
        """Evict the least recently used cached block of a group; with `transient`, of those that transient sequences
        have cached. Return False if the group has no such block.
        """
        pool = self._pools[group]
        if not (transient or pool.passed or pool.transient or pool.unused):
            self.points.give_way(group)
        entry = next(iter(pool.transient.values()), None) if transient else pool.next_to_go
        if entry is None:
            return False
        self._evict_entry(group, entry)
        return True

    def _evict_entry(self, group: int, entry: Entry) -> None:
        """Evict the block of an entry in a group.

        An entry without its block in a group that sees all tokens is useless, so the whole entry goes. Without its
        block in a windowed group, texts can still begin at a later place, whose window does not see that block.
        """
        if self.groups[group].spec.attention_window.tokens is None:
            self.remove(entry)
        else:
            self._pools[group].forget(entry.blocks[group])
            entry.blocks = tuple(GONE if g == group else block for g, block in enumerate(entry.blocks))
            self._prune(entry)

    def remove(self, entry: Entry) -> None:
        """Remove an entry from the prefix cache, with its blocks in all groups and its snapshots."""
        self._forget(entry)
        for pool, block in zip(self._pools, entry.blocks, strict=True):
            if block != GONE:
                pool.forget(block)
        self._prune(entry.parent)

    def _prune(self, node: Node) -> None:
        """Remove the entries at the end of a chain that have no blocks."""
        while isinstance(node, Entry) and set(node.blocks) == {GONE} and not (node.children or node.forgotten):
            self._forget(node)
            node = node.parent

    def _forget(self, entry: Entry) -> None:
        self.prefix.remove(entry)
        self.points.discard(entry)
        if self.snapshots is not None:
            self.snapshots.drop_all(entry.states)
