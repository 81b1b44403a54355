"""The block pools of all layer groups: growing, shrinking, pins, and making room by eviction.

Groups that see equally far always need equally many blocks, so they have equally many. A group that sees a window needs
few blocks, however long the sequences are.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence

import numpy as np

from cortexmlx.errors import KVCacheFull
from cortexmlx.kv.allocator import KVBlockAllocator, KVHandle
from cortexmlx.kv.prefix import GONE, Key, PrefixCache, PrefixEntry, PrefixMatch, PrefixNode
from cortexmlx.kv.snapshots import ResumePointOrder, SnapshotRegistry
from cortexmlx.kv.spec import GroupCounts, LayerGroup, blocks_per_group
from cortexmlx.kv.table import BlockTable, SequenceBlocks, split_into_runs
from cortexmlx.stats import BlockMap, BlockState, GroupBlocks


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
        snapshots: SnapshotRegistry | None = None,
        may_resize: Callable[[GroupCounts], bool] = lambda blocks: True,
    ) -> None:
        """Begin with `blocks` blocks in each group, one number for all groups or one for each, all of them free.

        The pools grow on demand up to `max_blocks`. `may_resize(blocks)` says whether the arena can get these numbers
        of blocks. If it cannot, what a group has becomes its limit, until `reset_limits`.
        """
        self.groups = tuple(groups)
        self.block_size = block_size
        self.blocks = blocks_per_group(groups, blocks)
        limits = blocks_per_group(groups, self.blocks if max_blocks is None else max_blocks)
        self.configured_blocks: GroupCounts = tuple(map(max, self.blocks, limits))
        """How many blocks each group may have if the system gives the memory."""
        self.max_blocks = self.configured_blocks
        """How many it may have now: less after the system has refused more."""
        self.prefix = PrefixCache(block_size) if prefix is None else prefix
        self.snapshots = snapshots
        self.spare: GroupCounts = tuple(0 for _ in groups)
        """Blocks of each group, within its limit, in which nothing is kept for chats: see `evict_for_transient`."""
        self._released_blocks: GroupCounts = tuple(0 for _ in groups)
        self._look_suffices = True
        self._may_resize = may_resize
        self._pools = [BlockPool(count) for count in self.blocks]
        self.points = WindowResumePoints(groups, self._pools, block_size)
        windows = [group.spec.attention_window for group in groups]
        self._same_window_groups = [
            {g for g, other_window in enumerate(windows) if other_window == window} for window in windows
        ]
        self._widest = max(range(len(groups)), key=lambda g: windows[g].tokens or float("inf"))

    def __iter__(self) -> Iterator[BlockPool]:
        return iter(self._pools)

    def __getitem__(self, group: int) -> BlockPool:
        return self._pools[group]

    @property
    def unused_entries(self) -> int:
        """The number of cached entries neither used by a sequence nor pinned, in the group that sees most tokens."""
        pool = self._pools[self._widest]
        return pool.evictable - len(pool.pinned)

    @property
    def block_counts(self) -> tuple[int, int, int]:
        """The used, cached and free blocks as in `CacheStats`, in constant time."""
        used_blocks = sum(pool.owned for pool in self._pools)
        return used_blocks, sum(pool.evictable for pool in self._pools), sum(self.blocks) - used_blocks

    @property
    def bytes_in_use(self) -> int:
        """The bytes of the blocks that belong to sequences. Cached blocks that no sequence uses do not count."""
        return sum(p.owned * self.block_size * g.bytes_per_token for p, g in zip(self._pools, self.groups, strict=True))

    @property
    def bytes_limit(self) -> int:
        """The bytes of the blocks of all groups at their limits."""
        pairs = zip(self.max_blocks, self.groups, strict=True)
        return sum(count * self.block_size * group.bytes_per_token for count, group in pairs)

    @property
    def fragmentation(self) -> float:
        """`1 - longest free run / free blocks` of the most fragmented group."""
        return max(pool.allocator.fragmentation() for pool in self._pools)

    def null_block(self, group: int) -> int:
        """Return the block of zeros that pads a group's block tables: the first one after the group's blocks."""
        return self.blocks[group]

    def block_map(self) -> BlockMap:
        """Return every block's `BlockState`. Scans all counts and cached blocks."""
        pictures = []
        for group, (layers, pool, limit) in enumerate(zip(self.groups, self._pools, self.max_blocks, strict=True)):
            states = np.minimum(pool.ref_counts, int(BlockState.SHARED)).astype(np.uint8)
            for queue in pool.queues:
                blocks = np.fromiter(queue, np.intp, len(queue))
                on_disk = np.fromiter((group in entry.on_disk for entry in queue.values()), bool, len(queue))
                states[blocks] = np.where(on_disk, BlockState.STORED, BlockState.CACHED)
            bytes_each = self.block_size * layers.bytes_per_token
            pictures.append(GroupBlocks(len(layers.layers), layers.spec.window, bytes_each, limit, states.tobytes()))
        return BlockMap(self.block_size, tuple(pictures))

    # -- growing and shrinking ----------------------------------------------------------------------------------------

    def grow(self, blocks: int | Sequence[int]) -> None:
        """Grow each group to `blocks` blocks if it has fewer. The arena must be resized before the next step."""
        for pool, count, have in zip(self._pools, blocks_per_group(self.groups, blocks), self.blocks, strict=True):
            if count > have:
                pool.grow(count - have)
        self._update_counts()

    def shrink(self, min_blocks: int | Sequence[int]) -> int:
        """Drop free blocks at the end of each group, down to `min_blocks` blocks. Return how many were dropped in all.

        The arena must be resized before the next step.
        """
        floors = blocks_per_group(self.groups, min_blocks)
        free_at_end = [pool.allocator.free_blocks_at_end for pool in self._pools]
        spare = [min(have - n, end) for have, n, end in zip(self.blocks, floors, free_at_end, strict=True)]
        dropped_counts = [max(0, min(spare[g] for g in group_set)) for group_set in self._same_window_groups]
        if not any(dropped_counts) or not self._may_resize(
            tuple(b - n for b, n in zip(self.blocks, dropped_counts, strict=True))
        ):
            return 0
        self._drop_end_blocks(dropped_counts)
        return sum(dropped_counts)

    def cap_at(self, blocks: Sequence[int]) -> None:
        """Set the pools' sizes and limits to the `blocks` of an arena that cannot grow. No sequence may have blocks."""
        self.grow(blocks)
        self._drop_end_blocks([have - count for have, count in zip(self.blocks, blocks, strict=True)])
        self.max_blocks = self.blocks
        self._look_suffices = False

    def shrink_to_minimum(self) -> None:
        """Shrink to one block in each group, after the arena's memory was released. No sequence may have blocks."""
        self.record_release()
        self._drop_end_blocks([have - 1 for have in self.blocks])

    def record_release(self) -> None:
        """Record the pools' size before the arena releases its memory, so that `is_growing_back` can compare."""
        self._released_blocks = tuple(map(max, self._released_blocks, self.blocks))

    @property
    def is_growing_back(self) -> bool:
        """Whether the pools are no larger than before memory was released, so the arena once had as many blocks."""
        return all(
            current_count <= released_count
            for current_count, released_count in zip(self.blocks, self._released_blocks, strict=True)
        )

    def reset_limits(self) -> None:
        """Allow growth to the configured blocks again, although the system refused it: memory may be free by now."""
        self.max_blocks = self.configured_blocks
        self._look_suffices = True

    def reset_limits_if_cheap(self) -> None:
        """Allow growth again if `may_resize` foresaw all refusals so far: another one would then cost nothing."""
        if self._look_suffices:
            self.reset_limits()

    def _drop_end_blocks(self, dropped_counts: Sequence[int]) -> None:
        """Drop `dropped_counts` blocks from the end of each group. All of them must be free."""
        for pool, count in zip(self._pools, dropped_counts, strict=True):
            if count:
                pool.shrink(count)
        self._update_counts()

    def _update_counts(self) -> None:
        """Update the number of blocks of each group."""
        self.blocks = tuple(len(pool.ref_counts) for pool in self._pools)

    # -- pins ---------------------------------------------------------------------------------------------------------

    def pin(self, group: int, keys: Sequence[Key]) -> None:
        """Pin keys in a group: their blocks, present or future, are evicted after all others."""
        self._pools[group].pins.update(keys)
        self._requeue(group, keys)

    def unpin(self, group: int, keys: Sequence[Key]) -> None:
        """Undo one `pin` of these keys."""
        pool = self._pools[group]
        pool.pins -= Counter(keys)
        self._requeue(group, keys)

    def _requeue(self, group: int, keys: Sequence[Key]) -> None:
        """Move the unowned blocks of these keys to the right eviction queue, after pins have changed."""
        pool = self._pools[group]
        for entry in map(self.prefix.get, reversed(keys)):
            if entry is not None and entry.blocks[group] != GONE and not pool.ref_counts[entry.blocks[group]]:
                pool.hold(entry.blocks[group])
                pool.make_evictable(entry.blocks[group])

    def pinned_keys(self, group: int) -> set[Key]:
        """Return the keys that are pinned in a group."""
        return set(self._pools[group].pins)

    @property
    def pinned_blocks(self) -> int:
        """The number of pinned blocks of all groups that are cached now."""
        pairs = ((group, self.prefix.get(key)) for group, pool in enumerate(self._pools) for key in pool.pins)
        return sum(entry is not None and entry.blocks[group] != GONE for group, entry in pairs)

    # -- making room --------------------------------------------------------------------------------------------------

    def obtainable_blocks(self, group: int, transient: bool = False) -> int:
        """Return how many blocks of a group a sequence can get: free, cached but unused, or not yet grown to. A
        transient sequence evicts only what transient sequences have cached.
        """
        pool = self._pools[group]
        evictable = len(pool.transient) if transient else pool.evictable
        return pool.allocator.free_blocks + evictable + self.max_blocks[group] - self.blocks[group]

    def evict_for_transient(self) -> None:
        """Evict unused blocks of non-transient sequences, the least recently used first, until each group has its
        number of `spare` blocks left for transient sequences. Blocks with owners do not count; pinned blocks stay.
        """
        for group, (pool, spare) in enumerate(zip(self._pools, self.spare, strict=True)):
            while spare and pool.evictable - len(pool.transient) > self.max_blocks[group] - spare:
                if not pool.passed and not pool.unused:
                    self.points.discard_until_evictable(group)
                entry = next(iter((pool.passed or pool.unused).values()), None)
                if entry is None:
                    break
                self._evict_entry(group, entry)

    def clear_transient(self, entry: PrefixEntry) -> None:
        """Mark an entry as no longer transient, because a sequence that is not transient uses it."""
        if entry.transient:
            entry.transient = False
            for pool, block in zip(self._pools, entry.blocks, strict=True):
                if block in pool.transient:
                    pool.hold(block)
                    pool.make_evictable(block)

    def drop_cached(self, entries: int | None = None) -> int:
        """Evict unused cached blocks, the least recently used first. Return how many were evicted.

        `entries` is the most blocks to evict in the group that sees the most tokens. Blocks of the same tokens in other
        groups go with them. None evicts all unused blocks of all groups.
        """
        evicted_count = 0
        while (entries is None or evicted_count < entries) and self._evict(self._widest):
            evicted_count += 1
        for group in range(len(self._pools)) if entries is None else ():
            while self._evict(group):
                evicted_count += 1
        return evicted_count

    def make_room(self, group: int, blocks: int, transient: bool = False) -> None:
        """Make `blocks` blocks of a group free: evict blocks that windows have passed, then grow towards the limit,
        then evict other unused blocks. For a `transient` sequence evict only what such sequences have cached.
        Raises KVCacheFull.
        """
        pool = self._pools[group]
        allocator = pool.allocator
        if allocator.free_blocks >= blocks:
            return
        while pool.passed and not transient and allocator.free_blocks < blocks:
            self._evict(group)
        if allocator.free_blocks < blocks <= self.obtainable_blocks(group, transient):
            self._try_grow(group, blocks - allocator.free_blocks)
        if blocks <= allocator.free_blocks + (len(pool.transient) if transient else pool.evictable):
            while allocator.free_blocks < blocks and self._evict(group, transient):
                pass
        if allocator.free_blocks < blocks:
            raise pool.cache_full_error(blocks, self.block_size)

    def _try_grow(self, group: int, min_added: int) -> None:
        """Grow a group, and all groups of equal window, to twice its size, or else by `min_added`, within the limit.

        If the system refuses both, lower the limit to what the group has.
        """
        current_count, limit = self.blocks[group], self.max_blocks[group]
        for target_count in (max(2 * current_count, current_count + min_added), current_count + min_added):
            target_blocks = tuple(
                min(target_count, limit) if g in self._same_window_groups[group] else n
                for g, n in enumerate(self.blocks)
            )
            if min(target_count, limit) > current_count and self._may_resize(target_blocks):
                self.grow(target_blocks)
                return
        self.max_blocks = tuple(
            current_count if g in self._same_window_groups[group] else n for g, n in enumerate(self.max_blocks)
        )

    def _evict(self, group: int, transient: bool = False) -> bool:
        """Evict the least recently used cached block of a group; with `transient`, only one that transient sequences
        have cached. Return False if there is none.
        """
        pool = self._pools[group]
        if not (transient or pool.passed or pool.transient or pool.unused):
            self.points.discard_until_evictable(group)
        entry = next(iter(pool.transient.values()), None) if transient else pool.next_eviction
        if entry is None:
            return False
        self._evict_entry(group, entry)
        return True

    def _evict_entry(self, group: int, entry: PrefixEntry) -> None:
        """Evict the block of an entry in a group.

        An entry without its block in a group that sees all tokens is useless, so the whole entry goes. Without its
        block in a windowed group, texts can still begin at a later place, whose window does not see that block.
        """
        if self.groups[group].spec.attention_window.tokens is None:
            self.remove(entry)
        else:
            self._pools[group].uncache(entry.blocks[group])
            entry.blocks = tuple(GONE if g == group else block for g, block in enumerate(entry.blocks))
            self._prune(entry)

    def remove(self, entry: PrefixEntry) -> None:
        """Remove an entry from the prefix cache, with its blocks in all groups and its snapshots."""
        self._remove_entry(entry)
        for pool, block in zip(self._pools, entry.blocks, strict=True):
            if block != GONE:
                pool.uncache(block)
        self._prune(entry.parent)

    def _prune(self, node: PrefixNode) -> None:
        """Remove the entries at the end of a chain that have no blocks in any group."""
        while isinstance(node, PrefixEntry) and set(node.blocks) == {GONE} and not (node.children or node.is_removed):
            self._remove_entry(node)
            node = node.parent

    def _remove_entry(self, entry: PrefixEntry) -> None:
        """Remove an entry from the prefix cache, with its resume point and its snapshots."""
        self.prefix.remove(entry)
        self.points.discard(entry)
        if self.snapshots is not None:
            self.snapshots.drop_all(entry.states)

    def check_invariants(self, sequences: Mapping[int, SequenceBlocks]) -> None:
        """Raise AssertionError if counts, tables, allocators, cache or points disagree. For tests and debug runs."""
        for group, pool in enumerate(self._pools):
            attention_window = self.groups[group].spec.attention_window
            owners = np.zeros(len(pool.ref_counts), np.int32)
            for seq, sequence in sequences.items():
                table = sequence.tables[group]
                assert len(set(table.blocks)) == len(table.blocks), f"sequence {seq} holds a block twice"
                assert table.end * self.block_size >= sequence.length, f"sequence {seq} is longer than its blocks"
                assert table.first * self.block_size <= attention_window.oldest_visible(sequence.length), (
                    f"sequence {seq} lacks what it sees"
                )
                owners[table.blocks] += 1
            assert (owners == pool.ref_counts).all(), f"group {group}: counts do not match the tables"
            free, queued_blocks = pool.free_block_numbers(), [block for queue in pool.queues for block in queue]
            uses = pool.ref_counts.copy()
            uses[free] += 1
            uses[queued_blocks] += 1
            uses[list(pool.sources)] += 1
            assert (uses > 0).all(), f"group {group}: blocks {np.flatnonzero(uses == 0)} are lost"
            assert not (pool.ref_counts[free].any() or pool.ref_counts[queued_blocks].any()), (
                f"group {group}: a block in use may be taken"
            )
            assert not pool.sources.keys() & {*free, *queued_blocks}, (
                f"group {group}: the source of a copy may be taken"
            )
            assert len({*free, *queued_blocks}) == len(free) + len(queued_blocks), (
                f"group {group}: a cached block is free"
            )
            assert all(pool.cached.get(b) is e for queue in pool.queues for b, e in queue.items()), (
                f"group {group}: what is gone waits to go"
            )
            assert all(entry.transient for entry in pool.transient.values()), f"group {group}: a block goes too early"
            last = {block for block in queued_blocks if pool.cached[block].key in pool.pins}
            assert last == set(pool.pinned), f"group {group}: what is pinned does not go last"
            entry_by_block = {
                entry.blocks[group]: entry for entry in self.prefix.entries if entry.blocks[group] != GONE
            }
            assert len(entry_by_block) == sum(entry.blocks[group] != GONE for entry in self.prefix.entries), (
                "a block has two entries"
            )
            assert pool.cached == entry_by_block, f"group {group}: a cached block does not lead to its entry"
            if attention_window.tokens is None:
                assert len(entry_by_block) == len(self.prefix), f"group {group}: an entry has no block"
        empty_entries = [entry for entry in self.prefix.entries if set(entry.blocks) == {GONE}]
        assert all(entry.children for entry in empty_entries), "an entry without blocks leads nowhere"
        self.prefix.check_invariants()
        self.points.check_invariants()


# The blocks of one layer group: which are free, how many sequences own each block, and which are only cached.


class BlockPool:
    """The blocks of one layer group: an allocator, a reference count per block in `ref_counts` (`[blocks]` int32), and
    the eviction queues.

    A block without owners is either free or cached. The allocator counts a cached block as used. Unowned cached blocks
    wait in one of five queues, and the first block of the first queue that is not empty is evicted next:

    - `passed`: blocks that a window has passed while their sequence continues, and blocks of text that a row has
      dropped;
    - `transient`: blocks that only transient sequences have used;
    - `unused`: other blocks, the least recently used first;
    - `needed`: blocks that a resume point of a window needs, by `points`: see `WindowResumePoints`. One can only go
      when no point needs it any more;
    - `pinned`: blocks whose keys are in `pins`.

    A block that is the source of a copy is in `sources`, with whether it was `passed`. It is in no queue until
    `release_copy_source`.
    """

    __slots__ = (
        *("allocator", "cached", "needed", "passed", "pinned", "pins", "points", "ref_counts", "sources", "transient"),
        "unused",
    )

    def __init__(self, blocks: int) -> None:
        self.allocator = KVBlockAllocator(blocks)
        self.ref_counts = np.zeros(blocks, np.int32)
        self.cached: dict[int, PrefixEntry] = {}
        self.passed: OrderedDict[int, PrefixEntry] = OrderedDict()
        self.transient: OrderedDict[int, PrefixEntry] = OrderedDict()
        self.unused: OrderedDict[int, PrefixEntry] = OrderedDict()
        self.needed: OrderedDict[int, PrefixEntry] = OrderedDict()
        self.pinned: OrderedDict[int, PrefixEntry] = OrderedDict()  # a queue, too: those that no row owns
        self.pins: Counter[Key] = Counter()  # how many pins each key has
        self.points: Counter[PrefixEntry] = Counter()
        self.sources: dict[int, bool] = {}

    @property
    def evictable(self) -> int:
        """The number of cached blocks without owners."""
        return sum(map(len, self.queues))

    @property
    def queues(self) -> tuple[OrderedDict[int, PrefixEntry], ...]:
        """The eviction queues, in the order in which they are emptied."""
        return self.passed, self.transient, self.unused, self.needed, self.pinned

    @property
    def next_eviction(self) -> PrefixEntry | None:
        """The entry whose block is evicted next; None if there is none. Blocks that a resume point needs are skipped.
        So discard resume points first, or a pinned block is evicted instead.
        """
        return next(iter((self.passed or self.transient or self.unused or self.pinned).values()), None)

    @property
    def owned(self) -> int:
        """The number of blocks that belong to at least one sequence."""
        return self.allocator.used_blocks - self.evictable

    def share(self, table: BlockTable, block: int) -> None:
        """Append a cached or owned block to a table, and count one more owner of the block."""
        self.ref_counts[block] += 1
        self.hold(block)
        table.blocks.append(block)

    def hold(self, block: int) -> bool:
        """Remove a cached block from its eviction queue. Return whether it was in `passed`, the queue evicted first."""
        for queue in (self.unused, self.needed, self.pinned, self.transient):
            queue.pop(block, None)
        return self.passed.pop(block, None) is not None

    def make_evictable(self, block: int, evict_first: bool = False) -> None:
        """Put a held block at the end of its eviction queue, if it has no owner."""
        if not self.ref_counts[block]:
            self._enqueue(block, self.passed if evict_first else self.unused)

    def hold_copy_source(self, block: int) -> bool:
        """Keep a cached block until it is copied, even if its owners free it. Return False if it is kept already."""
        if block in self.sources:
            return False
        self.sources[block] = self.hold(block)
        return True

    def release_copy_source(self, block: int) -> None:
        """Make the source block of a copy evictable again, after the copy."""
        self.make_evictable(block, self.sources.pop(block))

    def _enqueue(self, block: int, queue: OrderedDict[int, PrefixEntry]) -> None:
        """Queue an unowned cached block for eviction: in `queue`, unless it is pinned, transient or needed."""
        if block in self.sources:
            return
        entry = self.cached[block]
        if entry.key in self.pins:
            queue = self.pinned
        elif entry.transient:
            queue = self.transient
        elif entry in self.points:
            queue = self.needed
        queue[block] = entry

    def hold_for_point(self, entry: PrefixEntry, block: int) -> None:
        """Count one more resume point that needs an entry's block."""
        self.points[entry] += 1
        if self.points[entry] == 1 and not self.ref_counts[block] and self.cached.get(block) is entry:
            self.hold(block)
            self.make_evictable(block)

    def release_from_point(self, entry: PrefixEntry, block: int) -> None:
        """Count one resume point fewer for an entry's block. When no point needs the block any more, evict it early."""
        self.points[entry] -= 1
        if not self.points[entry]:
            del self.points[entry]
            if self.needed.get(block) is entry:
                del self.needed[block]
                self.passed[block] = entry

    def extend_table(self, table: BlockTable, required_end: int, preferred_end: int) -> None:
        """Extend a table to the end `required_end`, or to `preferred_end` if the run with the last required block can
        reach that far.

        The table's last run grows in place where it can; otherwise runs are added. `required_end` blocks more than the
        table has must be free.
        """
        table_end = table.end
        while table_end < required_end:
            added_run: KVHandle | None = None
            counts = tuple(dict.fromkeys((preferred_end - table_end, required_end - table_end)))
            for count in counts if table.blocks else ():
                extended_run = self.allocator.extend(KVHandle(table.blocks[-1], 1), count)
                if extended_run is not None:
                    added_run = KVHandle(extended_run.start + 1, count)
                    break
            if added_run is None:
                longest_run = self.allocator.largest_free_run
                added_run = self.allocator.allocate(next((c for c in counts if c <= longest_run), longest_run))
            self.ref_counts[added_run.start : added_run.start + added_run.count] = 1
            table.blocks.extend(range(added_run.start, added_run.start + added_run.count))
            table_end = table.end

    def drop_owner(self, blocks: list[int], evict_first: bool = False) -> int:
        """Take one owner from each of the `blocks` of a sequence. Return how many blocks became free.

        A block without owners is free, or can be evicted if it is cached, in the order of `blocks`. So callers give the
        ends of texts first, which are of no use without the beginnings. With `evict_first`, they go before all others.
        """
        if not blocks:
            return 0
        self.ref_counts[blocks] -= 1
        orphans = [b for b in blocks if not self.ref_counts[b]]
        free = [b for b in orphans if b not in self.cached]
        for run in split_into_runs(free):
            self.allocator.free(run)
        queue = self.passed if evict_first else self.unused
        for block in orphans:
            if block in self.cached:
                self._enqueue(block, queue)
        return len(free)

    def uncache(self, block: int) -> None:
        """Stop caching a block. It becomes free if it has no owner."""
        self.hold(block)
        del self.cached[block]
        if not self.ref_counts[block]:
            self.allocator.free(KVHandle(block, 1))

    def cache_full_error(self, blocks: int, block_size: int) -> KVCacheFull:
        """Return the error for a caller who needs `blocks` more blocks."""
        return KVCacheFull(
            f"the KV cache is full: {blocks} more blocks of {block_size} tokens are needed, "
            f"{self.allocator.free_blocks} of {self.allocator.total_blocks} are free; "
            "raise the KV memory (--kv-memory) or run fewer requests at once"
        )

    def grow(self, count: int) -> None:
        """Add `count` free blocks at the end."""
        self.allocator.grow(count)
        self.ref_counts = np.concatenate([self.ref_counts, np.zeros(count, np.int32)])

    def shrink(self, count: int) -> None:
        """Drop the last `count` blocks, which must be free."""
        self.allocator.shrink(count)
        self.ref_counts = self.ref_counts[:-count].copy()

    def free_block_numbers(self) -> list[int]:
        """Return the numbers of the free blocks."""
        return [b for run in self.allocator.free_runs() for b in range(run.start, run.stop)]

    def compact(self) -> dict[int, int]:
        """Renumber the used blocks from 0, in their order. Return the new number of each."""
        blocks, free = len(self.ref_counts), set(self.free_block_numbers())
        used_blocks = [b for b in range(blocks) if b not in free]
        counts = np.zeros(blocks, np.int32)
        counts[: len(used_blocks)] = self.ref_counts[used_blocks]
        self.ref_counts = counts
        self.allocator = KVBlockAllocator(blocks)
        if used_blocks:
            self.allocator.allocate(len(used_blocks))
        new_numbers = {old: new for new, old in enumerate(used_blocks)}
        self.cached = {new_numbers[b]: entry for b, entry in self.cached.items()}
        self.passed, self.transient, self.unused, self.needed, self.pinned = (
            OrderedDict((new_numbers[b], entry) for b, entry in queue.items()) for queue in self.queues
        )
        return new_numbers


# The resume points of layers with windows: places in cached texts whose windows' blocks are kept together.
#
# A text can begin only where the blocks of all its windows are cached, and a single one that is missing makes the
# others useless. So blocks that no point needs are evicted first, and then one point after the other, whole. Without
# mlx.


NeededBlocks = tuple[tuple[int, PrefixEntry], ...]
"""Blocks, each by its group and its entry."""


class WindowResumePoints:
    """The resume points of windowed layer groups: ends of cached prefixes after which a sequence can begin, because all
    blocks in the windows there are kept together. A point is named by the entry of the last block before it.
    """

    def __init__(self, groups: Sequence[LayerGroup], pools: Sequence[BlockPool], block_size: int) -> None:
        self._windows = {
            g: group.spec.attention_window for g, group in enumerate(groups) if group.spec.window is not None
        }
        self._pools = pools
        self._block_size = block_size
        self._order: ResumePointOrder[PrefixEntry] = ResumePointOrder()
        self._needed_blocks: dict[PrefixEntry, NeededBlocks] = {}

    def __len__(self) -> int:
        return len(self._order)

    def add(self, node: PrefixNode, tokens: int, spare: bool = False) -> None:
        """Add a resume point after the first `tokens` tokens of a text, at `node`, the entry of the last one. Does
        nothing if a block that it needs is not cached. A `spare` point is discarded first.
        """
        if not self._windows or not isinstance(node, PrefixEntry) or node.transient or node.is_removed:
            return
        if node in self._needed_blocks:
            if not spare:
                self._order.mark_used(node)
            return
        needed_blocks = tuple(self._visible_blocks(node, tokens))
        if any(entry.is_removed or entry.blocks[group] == GONE for group, entry in needed_blocks):
            return
        self._needed_blocks[node] = needed_blocks
        self._order.add(node, spare)
        for group, entry in needed_blocks:
            self._pools[group].hold_for_point(entry, entry.blocks[group])

    def _visible_blocks(self, last: PrefixEntry, tokens: int) -> Iterator[tuple[int, PrefixEntry]]:
        """Yield the blocks that the token after a text's first `tokens` tokens sees in all windows, the last first."""
        index = (tokens - 1) // self._block_size
        for group, window in self._windows.items():
            node: PrefixNode = last
            for _ in range(index - window.first_visible_block(tokens, self._block_size) + 1):
                assert isinstance(node, PrefixEntry), "a chain is shorter than its text"
                yield group, node
                node = node.parent

    def discard(self, entry: PrefixEntry) -> None:
        """Discard a resume point, if there is one, so that its blocks can be evicted."""
        self._order.discard(entry)
        for group, needed_entry in self._needed_blocks.pop(entry, ()):
            self._pools[group].release_from_point(needed_entry, needed_entry.blocks[group])

    def discard_until_evictable(self, group: int) -> None:
        """Discard resume points, in their order, until a block of a group is evictable."""
        needed_queue = self._pools[group].needed
        while needed_queue and not self._pools[group].passed:
            self.discard(next(point for point in self._order if self._keeps_from_eviction(point, group)))

    def _keeps_from_eviction(self, point: PrefixEntry, group: int) -> bool:
        """Return whether a resume point keeps an unowned block of a group from being evicted."""
        needed_queue = self._pools[group].needed
        return any(g == group and needed_queue.get(entry.blocks[g]) is entry for g, entry in self._needed_blocks[point])

    def supersede_older(
        self, match: PrefixMatch, kept_positions: Container[int], branching_entry: PrefixEntry | None
    ) -> None:
        """Mark the older points of a text as superseded, because it continues after a match; except those after
        `kept_positions` tokens, and `branching_entry`: see `ResumePointOrder.supersede_older`.
        """
        if self._windows:
            size = self._block_size
            points = [((i + 1) * size, entry) for i, entry in enumerate(match.entries) if entry in self._needed_blocks]
            self._order.supersede_older(points, kept_positions, branching_entry)

    def check_invariants(self) -> None:
        """Raise AssertionError if a block is kept for no point, or evictable though needed. For tests and debugging."""
        assert set(self._order) == self._needed_blocks.keys(), "a point is in no order, or one that is gone"
        assert not any(point.is_removed for point in self._needed_blocks), "a point of an entry that is gone"
        for group, pool in enumerate(self._pools):
            counts: dict[PrefixEntry, int] = {}
            for needed_blocks in self._needed_blocks.values():
                for g, entry in needed_blocks:
                    if g == group:
                        counts[entry] = counts.get(entry, 0) + 1
            assert counts == dict(pool.points), f"group {group}: points and what they need disagree"
            evictable_entries = (*pool.passed.values(), *pool.unused.values())
            assert not any(entry in counts for entry in evictable_entries), f"group {group}: a point may lose a block"
            assert all(entry in counts for entry in pool.needed.values()), f"group {group}: no point needs a block"
