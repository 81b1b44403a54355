"""Who owns which block: block tables, reference counts and lengths of all sequences. Pure Python and NumPy, no mlx.

Every layer group has its own pool of blocks and its own table per sequence; `KVCache` is the coordinator that
allocates for all groups or for none. A block is shared when its count is above one, and a shared block is never
written: `fork` shares full blocks and gives the child its own copy of the partial one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from cortexmlx.arrays import IntArray
from cortexmlx.errors import KVCacheFull
from cortexmlx.kv.allocator import KVBlockAllocator, KVHandle
from cortexmlx.kv.invariants import CacheStats, block_counts, cache_stats, check_invariants, worst_fragmentation
from cortexmlx.kv.pool import BlockPool
from cortexmlx.kv.prefix import Entry, Key, Match, PrefixCache
from cortexmlx.kv.spec import LayerGroup
from cortexmlx.kv.state.book import StateBook
from cortexmlx.kv.state.snapshots import Snapshots
from cortexmlx.kv.step import BlockCopy, copies_of
from cortexmlx.kv.table import SequenceBlocks


class KVCache:
    """Block tables and reference counts of every sequence, for all layer groups at once.

    `blocks` blocks of `block_size` tokens are available in each group, and more on demand up to `max_blocks`, while
    `may_resize(blocks)` says that the arena can follow; once it cannot, the cache's limit is what it has. Sequences
    are named by an integer of the caller's choice.
    """

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        blocks: int,
        block_size: int,
        *,
        max_blocks: int | None = None,
        prefix: PrefixCache | None = None,
        may_resize: Callable[[int], bool] = lambda blocks: True,
        snapshots: Snapshots | None = None,
    ) -> None:
        self.groups = tuple(groups)
        self.block_size = block_size
        self.blocks = blocks
        self.max_blocks = max(blocks, max_blocks or blocks)
        self.prefix = prefix or PrefixCache(block_size)
        self._may_resize = may_resize
        self._pools = [BlockPool(blocks) for _ in groups]
        self._sequences: dict[int, SequenceBlocks] = {}
        self.states = StateBook(block_size, snapshots, self._sequences)

    # -- the life of a sequence ---------------------------------------------------------------------------------------

    def match(self, tokens: Sequence[int], keys: Sequence[Key], max_tokens: int, salt: str | None = None) -> Match:
        """What `tokens` can begin with under `salt`, at most `max_tokens`; `keys` are `prefix.keys(tokens, salt)`."""
        return self.states.beginning(self.prefix.match(tokens, keys, max_tokens, salt), tokens, max_tokens)

    def in_use(self, match: Match) -> int:
        """How many of a match's full blocks belong to a sequence now: sharing those costs no memory."""
        return sum(self._owned(hit) for hit in match.entries)

    def allocate_for(
        self, seq: int, tokens: int, headroom: int = 0, match: Match | None = None
    ) -> tuple[BlockCopy, ...]:
        """Begin a sequence with room for `tokens` tokens, in one contiguous run per group where there is one.

        `headroom` more tokens are taken too if they fit into the same run. With `match`, the sequence begins with the
        cached blocks: full ones are shared, and the partial one becomes its own if nobody else uses it, else a copy;
        `length` then says how many tokens it has, and what it stores is shared under the match's salt. Returns the
        copies that the caller must make in the arena. Raises KVCacheFull with the numbers; then nothing changed.
        """
        if seq in self._sequences:
            raise ValueError(f"sequence {seq} already has blocks")
        sequence = self._sequences[seq] = SequenceBlocks(len(self.groups), self.prefix.root())
        source, own = (None, None) if match is None else self._adopt(sequence, match)
        if source is not None:
            self.prefix.mark_used(source)
        try:
            self._grow(seq, self.blocks_for(max(tokens, sequence.length)), self.blocks_for(tokens + headroom))
        except KVCacheFull:
            self.free(seq)
            if source is None:
                raise
        else:
            if own is not None:
                self.prefix.remove(own)
            self.states.begin(sequence, match, own)
        finally:
            if source is not None and not self._owned(source):
                self.prefix.mark_unused(source)
        if source is None or match is None:
            return ()
        if seq not in self._sequences:  # there is no room for the source of the copy beside the copy
            return self.allocate_for(seq, tokens, headroom, self.states.of_whole_blocks(match))
        full = sequence.length // self.block_size
        return tuple(BlockCopy(g, source.blocks[g], t.blocks[full]) for g, t in enumerate(sequence.tables))

    def _adopt(self, sequence: SequenceBlocks, match: Match) -> tuple[Entry | None, Entry | None]:
        """Give a new sequence the blocks of a match. Returns the partial entry: as the first, if its block must be
        copied, or as the second, if the block is now the sequence's own.
        """
        for hit in match.entries:
            self._take(sequence, hit.blocks)
            self.prefix.mark_used(hit)
        sequence.registered = len(match.entries)
        sequence.parent = match.last
        sequence.length = len(match.entries) * self.block_size + match.partial_tokens
        partial = match.partial
        if partial is None or len(partial.tokens) == self.block_size or self._owned(partial):
            return partial, None
        self.prefix.mark_used(partial)
        self._take(sequence, partial.blocks)
        return None, partial

    def _take(self, sequence: SequenceBlocks, blocks: Sequence[int]) -> None:
        for pool, table, block in zip(self._pools, sequence.tables, blocks, strict=True):
            pool.share(table, block)

    def _owned(self, cached: Entry) -> bool:
        """Whether a cached block belongs to a sequence: in one group as in all."""
        return bool(self._pools[0].ref_counts[cached.blocks[0]])

    def register(self, seq: int, tokens: Sequence[int], stored: int, keys: Sequence[Key] = ()) -> None:
        """Let others share the full blocks of a sequence whose first `stored` tokens are in the arena (or will be,
        before anyone reads them). `keys` are the known keys of its blocks.
        """
        sequence = self._sequences[seq]
        for index in range(sequence.registered, stored // self.block_size):
            content = tokens[index * self.block_size : (index + 1) * self.block_size]
            key = keys[index] if index < len(keys) else None
            cached = self.prefix.insert(sequence.parent, content, sequence.blocks_at(index), key)
            cached = cached or self.prefix.find(sequence.parent, content)
            if cached is None:
                return
            sequence.parent = cached
            sequence.registered = index + 1
            self.states.hang(sequence, cached, index)

    def release_blocks(self, seq: int, tokens: Sequence[int], stored: int, keys: Sequence[Key] = ()) -> None:
        """End a sequence and keep what it computed for others: its full blocks and its partial one."""
        self.register(seq, tokens, stored, keys)
        sequence = self._sequences[seq]
        full = stored // self.block_size
        rest = tokens[full * self.block_size : stored]
        if rest and sequence.registered == full:
            cached = self.prefix.insert(sequence.parent, rest, sequence.blocks_at(full))
            self.states.hang(sequence, cached or self.prefix.find(sequence.parent, rest), full)
        self.free(seq)

    def reserve(self, seq: int, tokens: int) -> None:
        """Make room for `tokens` tokens in all, growing the last run in place or adding runs. Raises KVCacheFull;
        then nothing changed.
        """
        self._grow(seq, self.blocks_for(tokens), 0)

    def append(self, seq: int, tokens: int) -> None:
        """Record that the sequence is `tokens` tokens longer, reserving room for them. Raises KVCacheFull; then
        nothing changed.
        """
        sequence = self._sequences[seq]
        self.reserve(seq, sequence.length + tokens)
        sequence.length += tokens

    def give_back(self, seq: int, tokens: int = 0) -> int:
        """Free the blocks beyond the sequence's length, or beyond `tokens` if that is more. Returns how many blocks
        that freed.
        """
        sequence = self._sequences[seq]
        keep = self.blocks_for(max(sequence.length, tokens))
        return sum(
            pool.decref_and_free(table.cut(keep)) for pool, table in zip(self._pools, sequence.tables, strict=True)
        )

    def fork(self, parent: int, child: int, tokens: int | None = None) -> tuple[BlockCopy, ...]:
        """Begin `child` as a copy of the first `tokens` tokens of `parent` (None: all of them).

        Full blocks are shared, the partial one is copied. Returns the copies that the caller must make in the arena,
        when the parent's tokens are there. Raises KVCacheFull; then nothing changed.
        """
        source = self._sequences[parent]
        length = source.length if tokens is None else tokens
        if child in self._sequences:
            raise ValueError(f"sequence {child} already has blocks")
        if not 0 <= length <= source.length:
            raise ValueError(f"sequence {parent} has {source.length} tokens and cannot be forked at {length}")
        full, rest = divmod(length, self.block_size)
        sequence = self._sequences[child] = SequenceBlocks(len(self.groups), source.parent)
        sequence.length = length
        self.states.fork(source, sequence)
        sequence.registered = min(full, source.registered)
        for _ in range(source.registered - sequence.registered):
            assert isinstance(sequence.parent, Entry)  # as many predecessors as registered blocks
            sequence.parent = sequence.parent.parent
        for index in range(full):
            self._take(sequence, source.blocks_at(index))
        try:
            self._grow(child, self.blocks_for(length), 0)
        except KVCacheFull:
            self.free(child)
            raise
        if not rest:
            return ()
        pairs = zip(source.blocks_at(full), sequence.blocks_at(full), strict=True)
        return copies_of([{old: new} for old, new in pairs])

    def free(self, seq: int) -> None:
        """End a sequence: each of its blocks loses one owner. Without owners, a cached block waits to be used again
        or evicted, and any other goes back to the allocator.
        """
        sequence = self._sequences.pop(seq)
        self.states.drop(sequence.states)
        held = [self.prefix.entry_of(block) for block in sequence.tables[0].blocks]
        for pool, table in zip(self._pools, sequence.tables, strict=True):
            pool.decref([b for i, b in enumerate(table.blocks) if i < len(held) and held[i] is not None])
            pool.decref_and_free([b for i, b in enumerate(table.blocks) if i >= len(held) or held[i] is None])
        for cached in reversed(held):
            if cached is not None and not self._owned(cached):
                self.prefix.mark_unused(cached)

    def drop_cached(self, entries: int | None = None) -> int:
        """Evict up to `entries` unused cached blocks, oldest first (None: all of them). Returns how many went."""
        dropped = 0
        while (entries is None or dropped < entries) and (old := self.prefix.evict()) is not None:
            self.states.drop(old.states)
            for pool, block in zip(self._pools, old.blocks, strict=True):
                pool.free_cached(block)
            dropped += 1
        return dropped

    # -- growing and shrinking ----------------------------------------------------------------------------------------

    def grow(self, blocks: int) -> None:
        """Bring the cache to `blocks` blocks per group. The arena must follow before the next step."""
        for pool in self._pools:
            pool.grow(blocks - self.blocks)
        self.blocks = blocks

    def shrink(self, least: int) -> int:
        """Give up free blocks at the end, down to `least`. Returns how many blocks went. The arena must follow before
        the next step.
        """
        less = min(self.blocks - least, *(p.allocator.free_blocks_at_end for p in self._pools))
        if less <= 0 or not self._may_resize(self.blocks - less):
            return 0
        for pool in self._pools:
            pool.shrink(less)
        self.blocks -= less
        return less

    def stay(self, blocks: int) -> None:
        """The arena could not follow: have its `blocks` blocks, and no more later. Nobody may have any."""
        if blocks > self.blocks:
            self.grow(blocks)
        self.shrink(blocks)
        self.max_blocks = self.blocks

    def compact(self) -> tuple[BlockCopy, ...]:
        """Move all blocks that hold something to the front, in their order, so that runs stay runs and what is free
        is one run.

        Returns the copies that the caller must make in the arena, in order and before the next step: no target lies
        behind its source.
        """
        moved = [pool.compact() for pool in self._pools]
        for sequence in self._sequences.values():
            for table, new_numbers in zip(sequence.tables, moved, strict=True):
                table.blocks = [new_numbers[b] for b in table.blocks]
        self.prefix.move(moved)
        return copies_of(moved)

    # -- what a step needs to know ------------------------------------------------------------------------------------

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens: `ceil(tokens / block_size)`."""
        return -(-tokens // self.block_size)

    @property
    def block_counts(self) -> tuple[int, int, int]:
        """Used, cached and free blocks as in `stats`, but O(1) however many blocks there are."""
        return block_counts(self._pools, self.prefix)

    @property
    def bytes_in_use(self) -> int:
        """Bytes of the blocks that belong to sequences; cached ones that nobody uses do not count."""
        return sum(
            (pool.allocator.used_blocks - self.prefix.unused) * self.block_size * group.bytes_per_token
            for pool, group in zip(self._pools, self.groups, strict=True)
        )

    @property
    def sequences(self) -> set[int]:
        """The sequences that have blocks."""
        return set(self._sequences)

    def length(self, seq: int) -> int:
        """Tokens of the sequence."""
        return self._sequences[seq].length

    def block_table(self, seq: int, group: int) -> IntArray:
        """The sequence's blocks in token order, `[blocks]` int32."""
        return self._sequences[seq].tables[group].array()

    def run(self, seq: int, group: int, tokens: int) -> KVHandle | None:
        """The run that holds the first `tokens` tokens, or None if they lie in more than one."""
        return self._sequences[seq].tables[group].run(self.blocks_for(tokens))

    def slots(self, seq: int, group: int, start: int, count: int) -> IntArray:
        """The flat slots `block * block_size + offset` of tokens `start .. start + count`, `[count]` int32."""
        return self._sequences[seq].tables[group].slots(start, count, self.block_size)

    # -- looking inside -----------------------------------------------------------------------------------------------

    @property
    def obtainable_blocks(self) -> int:
        """Blocks that a new sequence can count on, in the fullest group: free, cached but unused, or not yet grown
        to.
        """
        return min(p.allocator.free_blocks for p in self._pools) + self.prefix.unused + self.max_blocks - self.blocks

    def obtainable_blocks_without(self, promised: Mapping[int, int]) -> int:
        """`obtainable_blocks` if each of these sequences gave back its blocks beyond so many tokens or its length."""
        kept = {seq: self.blocks_for(max(tokens, self.length(seq))) for seq, tokens in promised.items()}
        return (self.prefix.unused + self.max_blocks - self.blocks) + min(
            pool.allocator.free_blocks
            + sum(max(0, len(self._sequences[seq].tables[g].blocks) - blocks) for seq, blocks in kept.items())
            for g, pool in enumerate(self._pools)
        )

    @property
    def capacity_tokens(self) -> int:
        """Tokens that one sequence alone could have."""
        return self.max_blocks * self.block_size

    @property
    def null_block(self) -> int:
        """The arena's block of zeros, which pads block tables: the first behind those handed out."""
        return self.blocks

    def allocator(self, group: int) -> KVBlockAllocator:
        """The group's allocator."""
        return self._pools[group].allocator

    @property
    def fragmentation(self) -> float:
        """That of the worst group: `1 - longest free run / free blocks`."""
        return worst_fragmentation(self._pools)

    def stats(self) -> CacheStats:
        """Counts over all groups, at this moment."""
        return cache_stats(self._pools, self._sequences, self.prefix)

    def describe(self, seq: int) -> str:
        """A sequence's blocks for people: its runs as `start+count`, groups separated by bars."""
        return self._sequences[seq].describe()

    def check_invariants(self) -> None:
        """Raise AssertionError if counts, tables and allocators disagree: for tests and debug runs."""
        check_invariants(self._pools, self._sequences, self.prefix, self.block_size)
        self.states.check_invariants(self.prefix.states)

    # -- blocks in and out --------------------------------------------------------------------------------------------

    def _grow(self, seq: int, need: int, want: int) -> None:
        """Bring every table to `need` blocks, or to `want` if one run holds them; all groups or none."""
        tables = self._sequences[seq].tables
        before = [len(table.blocks) for table in tables]
        try:
            for pool, table in zip(self._pools, tables, strict=True):
                if need > len(table.blocks):
                    self._make_room(pool, need - len(table.blocks))
                    pool.extend(table, need, max(need, want))
        except KVCacheFull:
            for pool, table, count in zip(self._pools, tables, before, strict=True):
                pool.decref_and_free(table.cut(count))
            raise

    def _make_room(self, pool: BlockPool, blocks: int) -> None:
        """See to `blocks` free blocks in a group: grow towards the limit, then evict what is cached and unused. Raises
        KVCacheFull.
        """
        allocator = pool.allocator
        short = blocks - allocator.free_blocks
        if 0 < short <= self.prefix.unused + self.max_blocks - self.blocks:
            self._grow_by(short)
        if blocks - allocator.free_blocks <= self.prefix.unused:
            while allocator.free_blocks < blocks and self.drop_cached(1):
                pass
        if allocator.free_blocks < blocks:
            raise pool.full(blocks, self.block_size)

    def _grow_by(self, least: int) -> None:
        """Grow towards the limit, to twice the size or by `least` blocks; what the system refuses is the limit."""
        for wanted in (max(2 * self.blocks, self.blocks + least), self.blocks + least):
            blocks = min(wanted, self.max_blocks)
            if blocks > self.blocks and self._may_resize(blocks):
                self.grow(blocks)
                return
        self.max_blocks = self.blocks
