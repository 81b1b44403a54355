"""The KV cache: which sequence owns which block. It coordinates block pools, block tables and the prefix cache.
Without mlx.

Every layer group has its own pool of blocks, and its own block table per sequence. `KVCache` allocates in all groups
or in none. A block is shared when its reference count is above one. A shared block is never written: `fork` shares full
blocks and copies the partial one.

A group that sees all tokens has blocks for all tokens of a sequence. A windowed group has only the blocks that the
sequence's next queries see. A prompt gets them step by step. The sequence gives up those that its window has passed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cortexmlx.disk.tier import STATE, DiskLoad, DiskTier, PieceLoad
from cortexmlx.errors import KVCacheFull
from cortexmlx.kv.allocator import KVHandle
from cortexmlx.kv.pools import BlockPools
from cortexmlx.kv.prefix import GONE, Key, PrefixEntry, PrefixMatch, PrefixNode, Salt, predecessor
from cortexmlx.kv.sizing import max_row_blocks
from cortexmlx.kv.snapshots import SequenceStates, first_branching_entry
from cortexmlx.kv.spec import GroupCounts
from cortexmlx.kv.step import BlockCopy, make_copies
from cortexmlx.kv.table import SequenceBlocks
from cortexmlx.types.arrays import IntArray


@dataclass(frozen=True)
class CacheStats:
    """Counts of blocks and sequences in the KV cache, summed over all layer groups."""

    total_blocks: int
    used_blocks: int
    """Blocks that belong to sequences."""
    shared_blocks: int
    """Those of them that belong to more than one sequence."""
    cached_blocks: int
    """Free blocks whose content may still be used again."""
    free_blocks: int
    """Blocks that belong to no sequence."""
    sequences: int
    tokens: int
    single_run_sequences: int
    fragmentation: float


class KVCache:
    """Allocates, shares and frees sequences' KV blocks in all layer groups at once. Callers choose sequence numbers."""

    def __init__(self, pools: BlockPools) -> None:
        self.pools = pools
        self.groups = pools.groups
        self.block_size = pools.block_size
        self.prefix = pools.prefix
        self.tables = SequenceTables(pools)
        self._sequences = self.tables.sequences
        self.states = SequenceStates(pools.block_size, pools.snapshots, self._sequences)
        self.has_states = self.states.has_states
        """Whether the model has recurrent states: a text can then go on only from where such were kept."""
        self.can_take_back_drafts = True
        """Whether the newest tokens of a sequence can be taken back."""
        self.disk_tier: DiskTier | None = None

    @property
    def uses_token_memory(self) -> bool:
        """Whether each token takes memory, because some layer keeps its keys and values."""
        return any(group.layers for group in self.groups)

    @property
    def bytes_limit(self) -> int:
        """The most bytes that keys and values can take."""
        return self.pools.bytes_limit

    # -- what is cached -----------------------------------------------------------------------------------------------

    def match(self, tokens: Sequence[int], keys: Sequence[Key], max_tokens: int, salt: Salt = None) -> PrefixMatch:
        """Return the longest cached prefix of `tokens` under `salt` after which a sequence can begin, at most
        `max_tokens` tokens. `keys` are `prefix.keys(tokens, salt)`.
        """
        match = self.prefix.match(tokens, keys, max_tokens, salt)
        return self.states.longest_resumable(match, tokens, max_tokens, self.last_missing_block)

    def last_missing_block(self, match: PrefixMatch, tokens: int) -> int | None:
        """Return the index of the last block that the token after a match's first `tokens` tokens sees but that is no
        longer cached, in the first group that lacks one; None if all are cached.
        """
        for group in self.tables.windowed_groups:
            for index in range(
                self.tables.blocks_for(tokens) - 1, self.tables.first_visible_block(group, tokens) - 1, -1
            ):
                if match.entry_at(index).blocks[group] == GONE:
                    return index
        return None

    def blocks_needed(self, tokens: int, match: PrefixMatch | None) -> list[int]:
        """Count the blocks per group for `tokens` tokens that begin with `match`, without blocks that sequences own."""
        matched_tokens, entries = (0, ()) if match is None else (match.matched_tokens(self.block_size), match.entries)
        needed_counts = []
        for group, (pool, limit) in enumerate(zip(self.pools, self.tables.max_blocks, strict=True)):
            front = self.tables.first_visible_block(group, matched_tokens)
            count = self.tables.blocks_for(tokens) - front
            shared = sum(bool(pool.ref_counts[entry.blocks[group]]) for entry in entries[front:])
            needed_counts.append((count if limit is None else min(count, limit)) - shared)
        return needed_counts

    # -- the life of a sequence ---------------------------------------------------------------------------------------

    def allocate_for(
        self,
        seq: int,
        tokens: int,
        headroom: int = 0,
        match: PrefixMatch | None = None,
        load: DiskLoad | None = None,
        transient: bool = False,
    ) -> tuple[BlockCopy, ...]:
        """Begin a sequence with room for `tokens` tokens, in one run per group if possible. A windowed group gets only
        the blocks that its queries see.

        seq: the number of the new sequence.
        headroom: more tokens that get room, too, if they fit into the run of the last needed block.
        match: cached blocks with which the sequence begins. Full blocks are shared. The partial block is taken over if
            no other sequence uses it, and copied otherwise. What the sequence stores is shared under the match's salt.
        load: blocks that continue the match, which then has no partial block. See `load`.
        transient: the sequence evicts nothing but what transient sequences have cached, and what it caches is evicted
            before what others have. It copies a partial block, so that the next one finds it, too.

        Return the copies that the caller must make in the arena. Their sources stay cached until
        `release_copy_sources`.
        Raises KVCacheFull. Then nothing has changed.
        """
        if seq in self._sequences:
            raise ValueError(f"sequence {seq} already has blocks")
        sequence = self._sequences[seq] = SequenceBlocks(len(self.groups), self.prefix.root())
        sequence.transient = transient
        copied_entry, taken_entry = (None, None) if match is None else self._share_matched_blocks(sequence, match, load)
        sources = () if copied_entry is None else zip(self.pools, copied_entry.blocks, strict=True)
        held_sources = [(pool, block) for pool, block in sources if pool.hold_copy_source(block)]
        try:
            counts = (self.tables.blocks_for(max(tokens, sequence.length)), self.tables.blocks_for(tokens + headroom))
            required_ends, preferred_ends = (self.tables.table_ends(sequence, count) for count in counts)
            self._extend_tables(sequence, required_ends, preferred_ends)
        except KVCacheFull:
            self.free(seq, will_retry=True)
            for pool, block in held_sources:
                pool.release_copy_source(block)
            if copied_entry is None or match is None:
                self.pools.evict_for_transient()
                raise
            # There is no room for both the partial block and its copy.
            without_partial = self.states.longest_resumable_blocks(match, self.last_missing_block)
            return self.allocate_for(seq, tokens, headroom, without_partial, transient=transient)
        self.states.begin(sequence, match, taken_entry)
        if taken_entry is not None:
            self.pools.remove(taken_entry)
        if copied_entry is None:
            return ()
        full = sequence.length // self.block_size
        return tuple(BlockCopy(g, copied_entry.blocks[g], t.block_at(full)) for g, t in enumerate(sequence.tables))

    def _share_matched_blocks(
        self, sequence: SequenceBlocks, match: PrefixMatch, load: DiskLoad | None
    ) -> tuple[PrefixEntry | None, PrefixEntry | None]:
        """Give a new sequence the blocks of a match. Return a pair of entries: a partial block to copy for the
        sequence, and a partial block that the sequence has taken over. One of the two, or both, are None.
        """
        sequence.registered = len(match.entries)
        sequence.parent = match.last_node
        sequence.length = (
            match.matched_tokens(self.block_size) if load is None else load.blocks_after_load * self.block_size
        )
        partial = match.partial
        takes_over = partial is not None and len(partial.tokens) < self.block_size and not self._in_use(partial)
        takes_over = takes_over and not sequence.transient
        for entry in () if sequence.transient else match.entries:
            self.pools.clear_transient(entry)
        for group, (pool, table) in enumerate(zip(self.pools, sequence.tables, strict=True)):
            table.first = self.tables.first_visible_block(group, sequence.length)
            for index in range(table.first, len(match.entries) + takes_over):
                pool.share(table, match.entry_at(index).blocks[group])
        return (None, partial) if takes_over else (partial, None)

    def release_copy_sources(self) -> None:
        """Make the sources of all planned copies evictable again, because later plans run after these copies."""
        for pool in self.pools:
            for block in list(pool.sources):
                pool.release_copy_source(block)

    def _in_use(self, entry: PrefixEntry) -> bool:
        """Return whether an entry's block belongs to a sequence, or is the source of a copy, in any group."""
        pairs = zip(self.pools, entry.blocks, strict=True)
        return any(block != GONE and (pool.ref_counts[block] or block in pool.sources) for pool, block in pairs)

    def cache_loaded_blocks(
        self, seq: int, load: DiskLoad, tokens: Sequence[int], keys: Sequence[Key]
    ) -> tuple[PieceLoad, ...]:
        """Cache the blocks that a sequence gets from disk, as if it had computed them.

        The sequence has begun by `allocate_for` with the tokens of this load. Return the pieces that the caller must
        load into the arena before the next step.
        """
        sequence, tier = self._sequences[seq], self.disk_tier
        assert tier is not None
        first, loads = sequence.registered, []
        for group, table in enumerate(sequence.tables):
            indices = range(max(table.first, first), load.blocks_after_load)
            loads += [PieceLoad(group, table.block_at(index), load.piece(index, group)) for index in indices]
        if tier.states:
            sequence.snapshot = self.states.make_snapshot(seq, sequence.length)
            assert sequence.snapshot is not None  # without snapshots nothing is loaded
            loads.append(PieceLoad(STATE, sequence.snapshot, load.piece(load.blocks_after_load - 1, STATE)))
        self.register(seq, tokens, sequence.length, keys)
        entry = sequence.parent
        for _ in range(sequence.registered - first):
            assert isinstance(entry, PrefixEntry)  # as many predecessors as registered blocks
            for group, _piece in tuple(tier.unstored_pieces(entry)):
                tier.mark_stored(entry, group)
            entry = entry.parent
        return tuple(loads)

    def register(self, seq: int, tokens: Sequence[int], stored_count: int, keys: Sequence[Key] = ()) -> None:
        """Add the full blocks of a sequence's first `stored_count` tokens to the prefix cache, so that others can share
        them.

        These tokens are in the arena, or will be before anyone reads them. `keys` are the known keys of its blocks.
        """
        sequence = self._sequences[seq]
        for index in range(sequence.registered, stored_count // self.block_size):
            content = tokens[index * self.block_size : (index + 1) * self.block_size]
            cached = self._cache_block(sequence, index, content, keys[index] if index < len(keys) else None)
            if cached is None:
                return
            sequence.parent = cached
            sequence.registered = index + 1
            self.states.move_to_entry(sequence, cached, index)
            if self.disk_tier is not None and not sequence.transient:
                self.disk_tier.on_cached(cached)

    def _cache_block(
        self, sequence: SequenceBlocks, index: int, content: Sequence[int], key: Key | None
    ) -> PrefixEntry | None:
        """Return the prefix cache's entry for a sequence's block with the tokens `content`, new or already cached.
        None if another text has the same key.

        A cached entry that lacks blocks of some groups gets the sequence's.
        """
        blocks = sequence.blocks_at(index)
        pairs = list(zip(self.pools, blocks, strict=True))
        has_blocks = set(blocks) != {GONE}
        some_cached = any(block in pool.cached for pool, block in pairs)
        if has_blocks and not some_cached:
            entry = self.prefix.insert(sequence.parent, content, blocks, key)
            if entry is not None:
                entry.transient = sequence.transient
                for pool, block in pairs:
                    if block != GONE:
                        pool.cached[block] = entry
                return entry
        entry = self.prefix.find(sequence.parent, content)
        if entry is not None and not sequence.transient:
            self.pools.clear_transient(entry)
        if entry is not None and GONE in entry.blocks:
            filled_blocks = list(entry.blocks)
            for group, (pool, block) in enumerate(pairs):
                if filled_blocks[group] == GONE and block != GONE and block not in pool.cached:
                    filled_blocks[group] = block
                    pool.cached[block] = entry
            entry.blocks = tuple(filled_blocks)
        return entry

    def cache_and_free(
        self, seq: int, tokens: Sequence[int], stored_count: int, keys: Sequence[Key] = (), evict_first: bool = False
    ) -> None:
        """Cache all blocks of a sequence's first `stored_count` tokens, the partial one too, then free the sequence."""
        self.register(seq, tokens, stored_count, keys)
        sequence = self._sequences[seq]
        full = stored_count // self.block_size
        rest = tokens[full * self.block_size : stored_count]
        last: PrefixNode | None = sequence.parent
        if rest and sequence.registered == full:
            last = self._cache_block(sequence, full, rest, None)
            self.states.move_to_entry(sequence, last if isinstance(last, PrefixEntry) else None, full)
        if evict_first:
            self._discard_window_points(sequence)
        elif last is not None and sequence.registered == full:
            self.pools.points.add(last, stored_count)
        self.free(seq, evict_first)

    def _discard_window_points(self, sequence: SequenceBlocks) -> None:
        """Discard a sequence's resume points that lie within its windows."""
        fronts = [sequence.tables[group].first for group in self.tables.windowed_groups]
        node = sequence.parent
        for _ in range(sequence.registered - min(fronts, default=sequence.registered)):
            assert isinstance(node, PrefixEntry)
            self.pools.points.discard(node)
            node = node.parent

    # -- where texts can be continued ---------------------------------------------------------------------------------

    def add_resume_point(self, seq: int, tokens: int, spare: bool = False) -> None:
        """Add a resume point after the last full block of a sequence's first `tokens` tokens: the blocks in the windows
        of the next token are kept together. A `spare` point is discarded first.
        """
        sequence, index = self._sequences[seq], tokens // self.block_size
        if self.tables.windowed_groups and 0 < index <= sequence.registered:
            last = predecessor(sequence.parent, sequence.registered - index)
            self.pools.points.add(last, index * self.block_size, spare)

    def reorder_resume_points(self, match: PrefixMatch, anchor: int) -> None:
        """Reorder the resume points of a text that continues after a match, so that its older points are discarded
        first: see `ResumePointOrder.supersede_older`. The next turn is expected to continue after `anchor` tokens.
        """
        if self.states.has_states or self.tables.windowed_groups:
            branching_entry = first_branching_entry(match, self.block_size)
            self.states.supersede_older(match, (anchor, anchor - 1), branching_entry)
            kept_positions = [position // self.block_size * self.block_size for position in (anchor, anchor - 1)]
            self.pools.points.supersede_older(match, kept_positions, branching_entry)

    # -- room for a sequence ------------------------------------------------------------------------------------------

    def reserve(self, seq: int, tokens: int) -> None:
        """Make room for a sequence to have `tokens` tokens in total. The last run grows, or new runs are added.

        Blocks that windows have passed are given up. Raises KVCacheFull; then nothing else has changed.
        """
        sequence = self._sequences[seq]
        self._free_passed_blocks(sequence)
        self._reserve(sequence, tokens)

    def append(self, seq: int, tokens: int) -> None:
        """Make a sequence `tokens` tokens longer, with room for them. Raises KVCacheFull; then nothing has changed."""
        sequence = self._sequences[seq]
        self._reserve(sequence, sequence.length + tokens)
        sequence.length += tokens

    def truncate(self, seq: int, tokens: int) -> None:
        """Cut a sequence back to its first `tokens` tokens. It keeps its blocks.

        Raises ValueError if one of the other tokens is cached. None of them may have left a snapshot.
        """
        sequence = self._sequences[seq]
        if not sequence.registered * self.block_size <= tokens <= sequence.length:
            raise ValueError(
                f"sequence {seq} has {sequence.length} tokens, of which {sequence.registered * self.block_size} are "
                f"cached, and cannot be cut back to {tokens}"
            )
        sequence.length = tokens

    def max_tokens_without_preemption(self, seq: int) -> int:
        """Return how many tokens a sequence can have before another one has to be preempted."""
        sequence = self._sequences[seq]
        self._free_passed_blocks(sequence)
        return min(t.end + self.pools.obtainable_blocks(g) for g, t in enumerate(sequence.tables)) * self.block_size

    def _free_passed_blocks(self, sequence: SequenceBlocks) -> None:
        """Free those blocks of a sequence that no later token sees, because its windows have passed them."""
        for group in self.tables.windowed_groups:
            passed_blocks = sequence.tables[group].remove_before(
                self.tables.first_visible_block(group, sequence.length)
            )
            self.pools[group].drop_owner(passed_blocks, evict_first=True)

    def free_spare_blocks(self, seq: int, tokens: int = 0) -> int:
        """Free a sequence's blocks beyond max(its length, `tokens`). Return how many became free."""
        sequence = self._sequences[seq]
        keep = self.tables.blocks_for(max(sequence.length, tokens))
        return sum(p.drop_owner(table.remove_from(keep)) for p, table in zip(self.pools, sequence.tables, strict=True))

    def can_fork(self, parent: int, tokens: int) -> bool:
        """Return whether the parent still has the blocks and the state that a fork after `tokens` tokens needs."""
        return not self.tables.has_freed_visible_blocks(parent, tokens) and self.states.can_fork(parent, tokens)

    def fork(self, parent: int, child: int, tokens: int | None = None) -> tuple[BlockCopy, ...]:
        """Begin the sequence `child` with the first `tokens` tokens of `parent` (None: all of them) and their blocks.

        Full blocks are shared, the partial block is copied. Return the copies that the caller must make when the
        parent's tokens are in the arena. Raises KVCacheFull; then nothing has changed.
        """
        source = self._sequences[parent]
        length = source.length if tokens is None else tokens
        if child in self._sequences:
            raise ValueError(f"sequence {child} already has blocks")
        if not 0 <= length <= source.length:
            raise ValueError(f"sequence {parent} has {source.length} tokens and cannot be forked at {length}")
        if self.tables.has_freed_visible_blocks(parent, length):
            raise ValueError(f"sequence {parent} has {source.length} tokens, and windows have passed those at {length}")
        full, rest = divmod(length, self.block_size)
        sequence = self._sequences[child] = SequenceBlocks(len(self.groups), source.parent)
        sequence.length = length
        self.states.fork(source, sequence)
        sequence.registered = min(full, source.registered)
        sequence.parent = predecessor(source.parent, source.registered - sequence.registered)
        for group, (pool, table) in enumerate(zip(self.pools, sequence.tables, strict=True)):
            table.first = self.tables.first_visible_block(group, length)
            for index in range(table.first, full):
                pool.share(table, source.tables[group].block_at(index))
        try:
            self._reserve(sequence, length)
        except KVCacheFull:
            self.free(child)
            raise
        if not rest:
            return ()
        pairs = zip(source.blocks_at(full), sequence.blocks_at(full), strict=True)
        return make_copies([{old: new} for old, new in pairs])

    def free(self, seq: int, evict_first: bool = False, will_retry: bool = False) -> None:
        """End a sequence, and take one owner from each of its blocks. A block without owners stays cached until it is
        evicted, or becomes free if it is not cached.

        With `evict_first`, its text continues elsewhere without these tokens. Then its cached blocks are evicted before
        all others, and before the arena grows, the last block first. `will_retry`: it begins again with the same match
        at once.
        """
        sequence = self._sequences.pop(seq)
        self.states.drop(sequence.states)
        for pool, table in zip(self.pools, sequence.tables, strict=True):
            pool.drop_owner(table.blocks[::-1], evict_first)
            if evict_first and self.disk_tier is not None:
                self.disk_tier.remove_queued(pool.passed[block] for block in table.blocks if block in pool.passed)
        if not will_retry:
            self.pools.evict_for_transient()

    def compact(self) -> tuple[BlockCopy, ...]:
        """Move all used blocks to the front, in their order, so that the free blocks become one run.

        Return the copies that the caller must make in the arena before the next step, in this order. No copy moves a
        block to a higher number.
        """
        block_maps = [pool.compact() for pool in self.pools]
        for sequence in self._sequences.values():
            for table, new_numbers in zip(sequence.tables, block_maps, strict=True):
                table.blocks = [new_numbers[b] for b in table.blocks]
        self.prefix.renumber_blocks(block_maps)
        return make_copies(block_maps)

    # -- looking inside -----------------------------------------------------------------------------------------------

    def stats(self) -> CacheStats:
        """Return the counts of blocks and sequences over all groups."""
        sequences = self._sequences.values()
        used_blocks, total_blocks = sum(p.owned for p in self.pools), sum(p.allocator.total_blocks for p in self.pools)
        return CacheStats(
            total_blocks=total_blocks,
            used_blocks=used_blocks,
            shared_blocks=sum(int((p.ref_counts > 1).sum()) for p in self.pools),
            cached_blocks=sum(p.evictable for p in self.pools),
            free_blocks=total_blocks - used_blocks,
            sequences=len(sequences),
            tokens=sum(sequence.length for sequence in sequences),
            single_run_sequences=sum(sequence.is_single_run() for sequence in sequences),
            fragmentation=self.pools.fragmentation,
        )

    def check_invariants(self) -> None:
        """Raise AssertionError if counts, tables and allocators disagree. For tests and debug runs."""
        self.pools.check_invariants(self._sequences)
        self.states.check_invariants(self.prefix.states)

    # -- blocks in and out --------------------------------------------------------------------------------------------

    def _reserve(self, sequence: SequenceBlocks, tokens: int) -> None:
        """Extend a sequence's tables for `tokens` tokens, if they are too short."""
        end = -(-tokens // self.block_size)
        for table in sequence.tables:
            if table.first + len(table.blocks) < end:  # `table.end` without a call: this runs for each row in each step
                self._extend_tables(sequence, required_ends := [end] * len(self.groups), required_ends)
                return

    def _extend_tables(
        self, sequence: SequenceBlocks, required_ends: Sequence[int], preferred_ends: Sequence[int]
    ) -> None:
        """Extend all groups' tables, or none: to `required_ends`, or to `preferred_ends` if one run goes that far."""
        previous_ends = [table.end for table in sequence.tables]
        try:
            for group, (pool, table) in enumerate(zip(self.pools, sequence.tables, strict=True)):
                if required_ends[group] > table.end:
                    self.pools.make_room(group, required_ends[group] - table.end, sequence.transient)
                    pool.extend_table(table, required_ends[group], max(required_ends[group], preferred_ends[group]))
        except KVCacheFull:
            for pool, table, end in zip(self.pools, sequence.tables, previous_ends, strict=True):
                pool.drop_owner(table.remove_from(end))
            raise


# The block tables of all sequences, and what a step reads of them. Pure Python and NumPy, no mlx.


_UNLIMITED = 1 << 40
"""Tokens of a sequence whose length costs no memory: more than any model's context."""


class SequenceTables:
    """The block tables of all sequences of a cache, one per layer group, and what a step reads of them. Their blocks
    are those of `pools`.

    The caller chooses the number of a sequence. `KVCache` begins, grows and ends sequences.
    """

    def __init__(self, pools: BlockPools) -> None:
        self._pools = pools
        self._block_size = pools.block_size
        self.sequences: dict[int, SequenceBlocks] = {}
        """The tables of each sequence, by its number."""
        self.max_blocks = [max_row_blocks(group.spec.attention_window, self._block_size) for group in pools.groups]
        """How many blocks of each group a sequence can have; None in a group that sees all tokens."""
        self.windowed_groups = [group for group, limit in enumerate(self.max_blocks) if limit is not None]
        """The groups that see a window of the tokens."""

    def blocks_for(self, tokens: int) -> int:
        """Return the number of blocks that hold `tokens` tokens: `ceil(tokens / block_size)`."""
        return -(-tokens // self._block_size)

    def first_visible_block(self, group: int, position: int) -> int:
        """Return the index of the first block that a query at `position` sees."""
        return self._pools.groups[group].spec.attention_window.first_visible_block(position, self._block_size)

    # -- one sequence -------------------------------------------------------------------------------------------------

    def length(self, seq: int) -> int:
        """Return the number of tokens of a sequence."""
        return self.sequences[seq].length

    def block_table(self, seq: int, group: int) -> IntArray:
        """Return a sequence's blocks in token order, `[blocks]` int32. A windowed group has given up the first ones."""
        return self.sequences[seq].tables[group].to_array()

    def table_row(self, seq: int, group: int, tokens: int, first_token: int = 0) -> IntArray:
        """Return the blocks of tokens `first_token .. tokens`, `[blocks]` int32, with the null block for each block
        that was given up. `first_token` is the first token of a block.
        """
        table = self.sequences[seq].tables[group]
        return table.table_row(first_token // self._block_size, self.blocks_for(tokens), self._pools.null_block(group))

    def find_run(self, seq: int, group: int, tokens: int, first_token: int = 0) -> KVHandle | None:
        """Return the run that holds tokens `first_token .. tokens`, or None if they are in several runs.

        A run may begin with blocks that the sequence has given up. They belong to others, and must not be read.
        """
        return self.sequences[seq].tables[group].find_run(first_token // self._block_size, self.blocks_for(tokens))

    def slots(self, seq: int, group: int, start: int, count: int) -> IntArray:
        """Return the arena slots `block * block_size + offset` of tokens `start .. start + count`, `[count]` int32. A
        token whose block was given up has a slot of the null block.
        """
        null = self._pools.null_block(group)
        return self.sequences[seq].tables[group].slots(start, count, self._block_size, null)

    def has_freed_visible_blocks(self, seq: int, tokens: int) -> bool:
        """Return whether a block that the token after a sequence's first `tokens` tokens sees has been freed."""
        tables = self.sequences[seq].tables
        return any(tables[group].first > self.first_visible_block(group, tokens) for group in self.windowed_groups)

    def table_ends(self, sequence: SequenceBlocks, end: int) -> list[int]:
        """Return each group's table end for a sequence of `end` blocks. Windowed tables have `max_blocks` at most."""
        pairs = zip(sequence.tables, self.max_blocks, strict=True)
        return [end if limit is None else min(end, table.first + limit) for table, limit in pairs]

    def describe(self, seq: int) -> str:
        """Return a sequence's blocks as text: its runs as `start+count`, with a bar between groups."""
        return self.sequences[seq].describe()

    # -- room for others ----------------------------------------------------------------------------------------------

    def can_obtain(
        self, blocks: Sequence[int], reserved_tokens: Mapping[int, int] | None = None, transient: bool = False
    ) -> bool:
        """Return whether a new sequence can get `blocks` blocks of each group. Parameters as in `obtainable_blocks`."""
        counts = self.obtainable_blocks(reserved_tokens or {}, transient)
        return all(needed_count <= n for needed_count, n in zip(blocks, counts, strict=True))

    def obtainable_blocks(self, reserved_tokens: Mapping[int, int], transient: bool = False) -> list[int]:
        """Return how many blocks of each group a new sequence can get if the others give back unneeded blocks.

        A `transient` one evicts nothing that others have cached. `reserved_tokens` has the tokens for which a sequence
        keeps room. It gives back the blocks beyond these tokens and beyond its length.
        """
        kept_ends = {seq: self.blocks_for(max(tokens, self.length(seq))) for seq, tokens in reserved_tokens.items()}
        counts = []
        for group in range(len(self._pools.groups)):
            tables = ((self.sequences[seq].tables[group], end) for seq, end in kept_ends.items())
            spare = sum(min(max(0, table.end - end), len(table.blocks)) for table, end in tables)
            counts.append(self._pools.obtainable_blocks(group, transient) + spare)
        return counts

    @property
    def capacity_tokens(self) -> int:
        """The most tokens that one sequence alone could have now. The system may refuse more memory for a while."""
        return self._capacity_of(self._pools.max_blocks)

    @property
    def configured_tokens(self) -> int:
        """The most tokens that one sequence alone could have if the system gives all configured memory."""
        return self._capacity_of(self._pools.configured_blocks)

    def _capacity_of(self, blocks: GroupCounts) -> int:
        """Return the most tokens that one sequence can have in `blocks` blocks of each group."""
        pairs = zip(blocks, self.max_blocks, strict=True)
        counts = (_UNLIMITED if limit is not None and limit <= n else n * self._block_size for n, limit in pairs)
        return min(counts)
