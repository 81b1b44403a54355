"""Who owns which block: block tables, reference counts and lengths of all sequences. Pure Python and NumPy, no mlx.

Every layer group has its own allocator and its own table per sequence; `KVCache` is the coordinator that allocates
for all groups or for none. A block is shared when its count is above one, and a shared block is never written: `fork`
shares full blocks and gives the child its own copy of the partial one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cortexmlx.errors import KVCacheFull
from cortexmlx.kv.allocator import KVBlockAllocator, KVHandle
from cortexmlx.kv.prefix import Entry, Key, Match, PrefixCache
from cortexmlx.kv.spec import LayerGroup

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True)
class BlockCopy:
    """A block whose bytes must be copied, in every layer of `group`, before the target is read or written."""

    group: int
    source: int
    target: int


@dataclass(frozen=True)
class CacheStats:
    """Blocks summed over all layer groups: `used_blocks` belong to sequences (`shared_blocks` of them to more than
    one), `free_blocks` to nobody, but the content of `cached_blocks` of these may be used again.
    """

    total_blocks: int
    used_blocks: int
    shared_blocks: int
    cached_blocks: int
    free_blocks: int
    sequences: int
    tokens: int
    single_run_sequences: int
    fragmentation: float


class _Table:
    """One sequence's blocks in one group, in token order, and whether they are a single run."""

    __slots__ = ("blocks",)

    def __init__(self) -> None:
        self.blocks: list[int] = []

    def single_run(self) -> bool:
        return not self.blocks or _ascending(self.blocks)


def _ascending(blocks: list[int]) -> bool:
    return all(b == blocks[0] + i for i, b in enumerate(blocks))


class _Sequence:
    """A sequence's tables (one per group), its length in tokens, and how many of its blocks are in the prefix cache,
    up to `parent`.
    """

    __slots__ = ("length", "parent", "registered", "tables")

    def __init__(self, groups: int) -> None:
        self.tables = [_Table() for _ in range(groups)]
        self.length = 0
        self.registered = 0
        self.parent: Entry | None = None


class KVCache:
    """Block tables and reference counts of every sequence, for all layer groups at once.

    `blocks` blocks of `block_size` tokens are available in each group. Sequences are named by an integer of the
    caller's choice.
    """

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        blocks: int,
        block_size: int,
        *,
        limit: int | None = None,
        prefix: PrefixCache | None = None,
    ) -> None:
        self.groups = tuple(groups)
        self.block_size = block_size
        self.blocks = blocks
        self.limit = max(blocks, limit or blocks)
        self.prefix = prefix or PrefixCache(block_size)
        self._allocators = [KVBlockAllocator(blocks) for _ in groups]
        self._counts = [np.zeros(blocks, np.int32) for _ in groups]
        self._sequences: dict[int, _Sequence] = {}

    # -- the life of a sequence ---------------------------------------------------------------------------------------

    def match(self, tokens: Sequence[int], keys: Sequence[Key], limit: int) -> Match:
        """What of `tokens` is cached, at most `limit` tokens; `keys` are `prefix.keys(tokens)`."""
        return self.prefix.match(tokens, keys, limit)

    def in_use(self, match: Match) -> int:
        """How many of a match's full blocks belong to a sequence now: sharing those costs no memory."""
        return sum(bool(self._counts[0][hit.blocks[0]]) for hit in match.entries)

    def allocate_for(
        self, seq: int, tokens: int, headroom: int = 0, match: Match | None = None
    ) -> tuple[BlockCopy, ...]:
        """Begin a sequence with room for `tokens` tokens, in one contiguous run per group where there is one.

        `headroom` more tokens are taken too if they fit into the same run. With `match`, the sequence begins with the
        cached blocks: full ones are shared, and the partial one becomes its own if nobody else uses it, else a copy;
        `length` then says how many tokens it has. Returns the copies that the caller must make in the arena. Raises
        KVCacheFull with the numbers; then nothing changed.
        """
        if seq in self._sequences:
            raise ValueError(f"sequence {seq} already has blocks")
        entry = self._sequences[seq] = _Sequence(len(self.groups))
        source, own = (None, None) if match is None else self._adopt(entry, match)
        if source is not None:
            self.prefix.acquire(source)
        try:
            self._grow(seq, self.blocks_for(max(tokens, entry.length)), self.blocks_for(tokens + headroom))
        except KVCacheFull:
            self.free(seq)
            if source is None:
                raise
        else:
            if own is not None:
                self.prefix.remove(own)
        finally:
            if source is not None and not self._counts[0][source.blocks[0]]:
                self.prefix.release(source)
        if source is None or match is None:
            return ()
        if seq not in self._sequences:  # there is no room for the source of the copy beside the copy
            return self.allocate_for(seq, tokens, headroom, Match(match.entries, None, 0))
        full = entry.length // self.block_size
        return tuple(BlockCopy(g, source.blocks[g], t.blocks[full]) for g, t in enumerate(entry.tables))

    def _adopt(self, entry: _Sequence, match: Match) -> tuple[Entry | None, Entry | None]:
        """Give a new sequence the blocks of a match. Returns the partial entry: as the first, if its block must be
        copied, or as the second, if the block is now the sequence's own.
        """
        for hit in match.entries:
            self._take(entry, hit.blocks)
            self.prefix.acquire(hit)
        entry.registered = len(match.entries)
        entry.parent = match.entries[-1] if match.entries else None
        entry.length = len(match.entries) * self.block_size + match.partial_tokens
        partial = match.partial
        if partial is None or len(partial.tokens) == self.block_size or self._counts[0][partial.blocks[0]]:
            return partial, None
        self.prefix.acquire(partial)
        self._take(entry, partial.blocks)
        return None, partial

    def _take(self, entry: _Sequence, blocks: Sequence[int]) -> None:
        for table, counts, block in zip(entry.tables, self._counts, blocks, strict=True):
            counts[block] += 1
            table.blocks.append(block)

    def register(self, seq: int, tokens: Sequence[int], stored: int, keys: Sequence[Key] = ()) -> None:
        """Let others share the full blocks of a sequence whose first `stored` tokens are in the arena (or will be,
        before anyone reads them). `keys` are the known keys of its blocks.
        """
        entry = self._sequences[seq]
        for index in range(entry.registered, stored // self.block_size):
            content = tokens[index * self.block_size : (index + 1) * self.block_size]
            key = keys[index] if index < len(keys) else None
            cached = self.prefix.insert(entry.parent, content, self._blocks_at(entry, index), key)
            cached = cached or self.prefix.find(entry.parent, content)
            if cached is None:
                return
            entry.parent = cached
            entry.registered = index + 1

    def retire(self, seq: int, tokens: Sequence[int], stored: int, keys: Sequence[Key] = ()) -> None:
        """End a sequence and keep what it computed for others: its full blocks and its partial one."""
        self.register(seq, tokens, stored, keys)
        entry = self._sequences[seq]
        full = stored // self.block_size
        rest = tokens[full * self.block_size : stored]
        if rest and entry.registered == full:
            self.prefix.insert(entry.parent, rest, self._blocks_at(entry, full))
        self.free(seq)

    def _blocks_at(self, entry: _Sequence, index: int) -> tuple[int, ...]:
        return tuple(table.blocks[index] for table in entry.tables)

    def reserve(self, seq: int, tokens: int) -> None:
        """Make room for `tokens` tokens in all, growing the last run in place or adding runs. Raises KVCacheFull;
        then nothing changed.
        """
        self._grow(seq, self.blocks_for(tokens), 0)

    def append(self, seq: int, tokens: int) -> None:
        """Record that the sequence is `tokens` tokens longer, reserving room for them. Raises KVCacheFull; then
        nothing changed.
        """
        entry = self._sequences[seq]
        self.reserve(seq, entry.length + tokens)
        entry.length += tokens

    def give_back(self, seq: int, tokens: int = 0) -> int:
        """Free the blocks beyond the sequence's length, or beyond `tokens` if that is more. Returns how many blocks
        that freed.
        """
        entry = self._sequences[seq]
        keep = self.blocks_for(max(entry.length, tokens))
        freed = 0
        for group, table in enumerate(entry.tables):
            freed += self._release(group, table.blocks[keep:])
            del table.blocks[keep:]
        return freed

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
        entry = self._sequences[child] = _Sequence(len(self.groups))
        entry.length = length
        entry.registered = min(full, source.registered)
        entry.parent = source.parent
        for _ in range(source.registered - entry.registered):
            assert entry.parent is not None  # as many predecessors as registered blocks
            entry.parent = entry.parent.parent
        for index in range(full):
            self._take(entry, self._blocks_at(source, index))
        try:
            self._grow(child, self.blocks_for(length), 0)
        except KVCacheFull:
            self.free(child)
            raise
        if not rest:
            return ()
        pairs = zip(self._blocks_at(source, full), self._blocks_at(entry, full), strict=True)
        return tuple(BlockCopy(group, old, new) for group, (old, new) in enumerate(pairs))

    def free(self, seq: int) -> None:
        """End a sequence: each of its blocks loses one owner. Without owners, a cached block waits to be used again
        or evicted, and any other goes back to the allocator.
        """
        entry = self._sequences.pop(seq)
        held = [self.prefix.entry_of(block) for block in entry.tables[0].blocks]
        for group, table in enumerate(entry.tables):
            plain = [b for i, b in enumerate(table.blocks) if i >= len(held) or held[i] is None]
            self._counts[group][[b for i, b in enumerate(table.blocks) if i < len(held) and held[i] is not None]] -= 1
            self._release(group, plain)
        for cached in reversed(held):
            if cached is not None and not self._counts[0][cached.blocks[0]]:
                self.prefix.release(cached)

    def drop_cached(self, entries: int | None = None) -> int:
        """Evict up to `entries` unused cached blocks, oldest first (None: all of them). Returns how many went."""
        dropped = 0
        while (entries is None or dropped < entries) and (old := self.prefix.evict()) is not None:
            for allocator, block in zip(self._allocators, old.blocks, strict=True):
                allocator.free(KVHandle(block, 1))
            dropped += 1
        return dropped

    # -- growing and shrinking ----------------------------------------------------------------------------------------

    def grow(self, blocks: int) -> None:
        """Bring the cache to `blocks` blocks per group. The arena must follow before the next step."""
        more = blocks - self.blocks
        for group, allocator in enumerate(self._allocators):
            allocator.grow(more)
            self._counts[group] = np.concatenate([self._counts[group], np.zeros(more, np.int32)])
        self.blocks = blocks

    def shrink(self, least: int) -> int:
        """Give up free blocks at the end, down to `least`. Returns how many blocks went. The arena must follow before
        the next step.
        """
        less = min(self.blocks - least, *(a.free_blocks_at_end for a in self._allocators))
        if less <= 0:
            return 0
        for group, allocator in enumerate(self._allocators):
            allocator.shrink(less)
            self._counts[group] = self._counts[group][:-less].copy()
        self.blocks -= less
        return less

    def compact(self) -> tuple[BlockCopy, ...]:
        """Move all blocks that hold something to the front, in their order, so that runs stay runs and what is free
        is one run.

        Returns the copies that the caller must make in the arena, in order and before the next step: no target lies
        behind its source.
        """
        copies = []
        moved: list[dict[int, int]] = []
        for group, allocator in enumerate(self._allocators):
            free = {b for run in allocator.free_runs() for b in range(run.start, run.stop)}
            kept = [b for b in range(self.blocks) if b not in free]
            places = {old: new for new, old in enumerate(kept)}
            copies += [BlockCopy(group, old, new) for old, new in places.items() if old != new]
            counts = np.zeros(self.blocks, np.int32)
            counts[: len(kept)] = self._counts[group][kept]
            self._counts[group] = counts
            self._allocators[group] = KVBlockAllocator(self.blocks)
            if kept:
                self._allocators[group].allocate(len(kept))
            moved.append(places)
        for entry in self._sequences.values():
            for table, places in zip(entry.tables, moved, strict=True):
                table.blocks = [places[b] for b in table.blocks]
        self.prefix.move(moved)
        return tuple(copies)

    # -- what a step needs to know ------------------------------------------------------------------------------------

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens: `ceil(tokens / block_size)`."""
        return -(-tokens // self.block_size)

    def length(self, seq: int) -> int:
        """Tokens of the sequence."""
        return self._sequences[seq].length

    def capacity(self, seq: int) -> int:
        """Tokens for which the sequence has blocks."""
        return min(len(t.blocks) for t in self._sequences[seq].tables) * self.block_size

    def block_table(self, seq: int, group: int) -> IntArray:
        """The sequence's blocks in token order, `[blocks]` int32."""
        return np.array(self._sequences[seq].tables[group].blocks, np.int32)

    def run(self, seq: int, group: int, tokens: int) -> KVHandle | None:
        """The run that holds the first `tokens` tokens, or None if they lie in more than one."""
        blocks = self._sequences[seq].tables[group].blocks[: self.blocks_for(tokens)]
        return KVHandle(blocks[0], len(blocks)) if blocks and _ascending(blocks) else None

    def slots(self, seq: int, group: int, start: int, count: int) -> IntArray:
        """The flat slots `block * block_size + offset` of tokens `start .. start + count`, `[count]` int32."""
        positions = np.arange(start, start + count)
        first, last = start // self.block_size, self.blocks_for(start + count)
        table = np.array(self._sequences[seq].tables[group].blocks[first:last], np.int64)
        block = table[positions // self.block_size - first] if count else positions
        return (block * self.block_size + positions % self.block_size).astype(np.int32)

    # -- looking inside -----------------------------------------------------------------------------------------------

    @property
    def free_blocks(self) -> int:
        """Blocks that a new sequence can count on, in the fullest group: free, cached but unused, or not yet grown
        to.
        """
        return min(a.free_blocks for a in self._allocators) + self.prefix.unused + self.limit - self.blocks

    @property
    def capacity_tokens(self) -> int:
        """Tokens that one sequence alone could have."""
        return self.limit * self.block_size

    @property
    def null_block(self) -> int:
        """The arena's block of zeros, which pads block tables: the first behind those handed out."""
        return self.blocks

    def allocator(self, group: int) -> KVBlockAllocator:
        """The group's allocator."""
        return self._allocators[group]

    @property
    def fragmentation(self) -> float:
        """That of the worst group: `1 - longest free run / free blocks`."""
        return max(a.fragmentation() for a in self._allocators)

    def stats(self) -> CacheStats:
        """Counts over all groups, at this moment."""
        entries = self._sequences.values()
        cached = self.prefix.unused * len(self.groups)
        return CacheStats(
            total_blocks=sum(a.total_blocks for a in self._allocators),
            used_blocks=sum(a.used_blocks for a in self._allocators) - cached,
            shared_blocks=sum(int((c > 1).sum()) for c in self._counts),
            cached_blocks=cached,
            free_blocks=sum(a.free_blocks for a in self._allocators) + cached,
            sequences=len(self._sequences),
            tokens=sum(e.length for e in entries),
            single_run_sequences=sum(all(t.single_run() for t in e.tables) for e in entries),
            fragmentation=self.fragmentation,
        )

    def describe(self, seq: int) -> str:
        """A sequence's blocks for people: its runs as `start+count`, groups separated by bars."""
        return " | ".join(
            " ".join(f"{h.start}+{h.count}" for h in _runs(t.blocks)) for t in self._sequences[seq].tables
        )

    def check_invariants(self) -> None:
        """Raise AssertionError if counts, tables and allocators disagree: for tests and debug runs."""
        for group, (allocator, counts) in enumerate(zip(self._allocators, self._counts, strict=True)):
            owners = np.zeros(self.blocks, np.int32)
            for seq, entry in self._sequences.items():
                blocks = entry.tables[group].blocks
                assert len(set(blocks)) == len(blocks), f"sequence {seq} holds a block twice"
                assert len(blocks) >= self.blocks_for(entry.length), f"sequence {seq} is longer than its blocks"
                owners[blocks] += 1
            assert (owners == counts).all(), f"group {group}: counts do not match the tables"
            free = [b for run in allocator.free_runs() for b in range(run.start, run.stop)]
            waiting = [blocks[group] for blocks in self.prefix.unused_blocks]
            uses = counts.copy()
            uses[free] += 1
            uses[waiting] += 1
            assert (uses > 0).all(), f"group {group}: blocks {np.flatnonzero(uses == 0)} are lost"
            assert not (counts[free].any() or counts[waiting].any()), f"group {group}: a block in use may be taken"
            assert len({*free, *waiting}) == len(free) + len(waiting), f"group {group}: a cached block is free"
        self.prefix.check_invariants()

    # -- blocks in and out --------------------------------------------------------------------------------------------

    def _grow(self, seq: int, need: int, want: int) -> None:
        """Bring every table to `need` blocks, or to `want` if one run holds them; all groups or none."""
        entry = self._sequences[seq]
        before = [len(t.blocks) for t in entry.tables]
        try:
            for group, table in enumerate(entry.tables):
                self._grow_table(group, table, need, max(need, want))
        except KVCacheFull:
            for group, (table, count) in enumerate(zip(entry.tables, before, strict=True)):
                self._release(group, table.blocks[count:])
                del table.blocks[count:]
            raise

    def _grow_table(self, group: int, table: _Table, need: int, want: int) -> None:
        allocator = self._allocators[group]
        have = len(table.blocks)
        if not self._make_room(group, need - have):
            raise KVCacheFull(
                f"the KV cache is full: {need - have} more blocks of {self.block_size} tokens are needed, "
                f"{allocator.free_blocks} of {allocator.total_blocks} are free; "
                "raise the KV memory (--kv-memory) or run fewer requests at once"
            )
        while have < need:
            added: KVHandle | None = None
            counts = tuple(dict.fromkeys((want - have, need - have)))
            for count in counts if table.blocks else ():
                grown = allocator.extend(KVHandle(table.blocks[-1], 1), count)
                if grown is not None:
                    added = KVHandle(grown.start + 1, count)
                    break
            if added is None:
                longest = allocator.largest_free_run
                added = allocator.allocate(next((c for c in counts if c <= longest), longest))
            self._counts[group][added.start : added.start + added.count] = 1
            table.blocks.extend(range(added.start, added.start + added.count))
            have = len(table.blocks)

    def _make_room(self, group: int, blocks: int) -> bool:
        """See to `blocks` free blocks in a group: grow towards the limit, then evict what is cached and unused."""
        allocator = self._allocators[group]
        short = blocks - allocator.free_blocks
        if short > self.prefix.unused + self.limit - self.blocks:
            return False
        if short > 0 and self.blocks < self.limit:
            self.grow(min(self.limit, max(2 * self.blocks, self.blocks + short)))
        while allocator.free_blocks < blocks and self.drop_cached(1):
            pass
        return allocator.free_blocks >= blocks

    def _release(self, group: int, blocks: list[int]) -> int:
        """Take one owner from each uncached block; free those that have none left. Returns how many were freed."""
        if not blocks:
            return 0
        counts = self._counts[group]
        counts[blocks] -= 1
        orphans = [b for b in blocks if counts[b] == 0]
        for run in _runs(orphans):
            self._allocators[group].free(run)
        return len(orphans)


def _runs(blocks: Sequence[int]) -> list[KVHandle]:
    """Split block numbers into runs of consecutive ones, in the order given."""
    runs: list[KVHandle] = []
    for block in blocks:
        if runs and block == runs[-1].start + runs[-1].count:
            runs[-1] = KVHandle(runs[-1].start, runs[-1].count + 1)
        else:
            runs.append(KVHandle(block, 1))
    return runs
