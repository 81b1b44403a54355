"""Who owns which block: block tables, reference counts and lengths of all sequences. Pure Python and NumPy, no mlx.

Every layer group has its own pool of blocks and its own table per sequence; `KVCache` is the coordinator that
allocates for all groups or for none. A block is shared when its count is above one, and a shared block is never
written: `fork` shares full blocks and gives the child its own copy of the partial one.

A group that sees all tokens has blocks for all of a sequence. One that sees a window has those that the sequence's next
queries see: a prompt gets them step by step, and what lies behind the window is given up while the sequence goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cortexmlx.errors import KVCacheFull
from cortexmlx.kv.blocks.table import SequenceBlocks
from cortexmlx.kv.invariants import check_invariants
from cortexmlx.kv.lower import STATE, DiskLoad, LowerTier, PieceLoad
from cortexmlx.kv.prefix import GONE, Entry, Key, Match
from cortexmlx.kv.sequences import SequenceTables
from cortexmlx.kv.spec import LayerGroup
from cortexmlx.kv.state.book import StateBook
from cortexmlx.kv.state.snapshots import Snapshots
from cortexmlx.kv.step import BlockCopy, copies_of


class KVCache(SequenceTables):
    """Block tables and reference counts of every sequence, for all layer groups at once.

    `blocks` blocks of `block_size` tokens are available in each group (one number for all, or one for each), and more
    on demand up to `max_blocks`, as `BlockPools` says. Sequences are named by an integer of the caller's choice. With
    `needs_ends` what one leaves may be of use only to those that go on where it ended.
    """

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        blocks: int | Sequence[int],
        block_size: int,
        *,
        snapshots: Snapshots | None = None,
        **options: Any,
    ) -> None:
        super().__init__(groups, blocks, block_size, **options)
        self.states = StateBook(block_size, snapshots, self._sequences)
        self.needs_ends = self.states.needed
        self.lower: LowerTier | None = None

    # -- what is cached -----------------------------------------------------------------------------------------------

    def match(self, tokens: Sequence[int], keys: Sequence[Key], max_tokens: int, salt: str | None = None) -> Match:
        """What `tokens` can begin with under `salt`, at most `max_tokens`; `keys` are `prefix.keys(tokens, salt)`."""
        match = self.prefix.match(tokens, keys, max_tokens, salt)
        return self.states.beginning(match, tokens, max_tokens, self.lacks)

    def lacks(self, match: Match, tokens: int) -> int | None:
        """The place of a block that is gone and that the token behind a match's first `tokens` ones sees; None if there
        is none. Behind it there is none in the same group.
        """
        for group in self._windows:
            for place in range(self.blocks_for(tokens) - 1, self._front(group, tokens) - 1, -1):
                if match.block(place).blocks[group] == GONE:
                    return place
        return None

    def blocks_needed(self, tokens: int, match: Match | None) -> list[int]:
        """How many blocks of each group it takes to begin a sequence of `tokens` tokens with a match: those of the
        match that belong to a sequence now cost no memory.
        """
        begin, entries = (0, ()) if match is None else (match.tokens(self.block_size), match.entries)
        needed = []
        for group, (pool, most) in enumerate(zip(self._pools, self._most, strict=True)):
            front = self._front(group, begin)
            count = self.blocks_for(tokens) - front
            shared = sum(bool(pool.ref_counts[hit.blocks[group]]) for hit in entries[front:])
            needed.append((count if most is None else min(count, most)) - shared)
        return needed

    # -- the life of a sequence ---------------------------------------------------------------------------------------

    def allocate_for(
        self, seq: int, tokens: int, headroom: int = 0, match: Match | None = None, loaded: int = 0
    ) -> tuple[BlockCopy, ...]:
        """Begin a sequence with room for `tokens` tokens, in one contiguous run per group where there is one; in groups
        of windows, for as many as it sees there.

        `headroom` more tokens are taken too if they fit into the same run. With `match`, the sequence begins with the
        cached blocks: full ones are shared, and the partial one becomes its own if nobody else uses it, else a copy;
        `length` then says how many tokens it has, and what it stores is shared under the match's salt. `loaded` tokens
        of whole blocks, more than the match has, will come from the tier below (see `load`). Returns the
        copies that the caller must make in the arena; their sources stay as they are until `let_go_sources`. Raises
        KVCacheFull with the numbers; then nothing changed.
        """
        if seq in self._sequences:
            raise ValueError(f"sequence {seq} already has blocks")
        sequence = self._sequences[seq] = SequenceBlocks(len(self.groups), self.prefix.root())
        source, own = (None, None) if match is None else self._adopt(sequence, match, loaded)
        pairs = () if source is None else zip(self._pools, source.blocks, strict=True)
        held = [(pool, block) for pool, block in pairs if pool.hold_source(block)]
        try:
            counts = (self.blocks_for(max(tokens, sequence.length)), self.blocks_for(tokens + headroom))
            need, want = ([self._at_most(sequence, g, n) for g in range(len(self.groups))] for n in counts)
            self._grow(sequence, need, want)
        except KVCacheFull:
            self.free(seq)
            for pool, block in held:
                pool.let_go_source(block)
            if source is None or match is None:
                raise
            # There is no room for the source of the copy beside the copy.
            less = self.states.beginning_of_blocks(match, self.lacks)
            return self.allocate_for(seq, tokens, headroom, less)
        self.states.begin(sequence, match, own)
        if own is not None:
            self._remove(own)
        if source is None:
            return ()
        full = sequence.length // self.block_size
        return tuple(BlockCopy(g, source.blocks[g], t.at(full)) for g, t in enumerate(sequence.tables))

    def _at_most(self, sequence: SequenceBlocks, group: int, place: int) -> int:
        """A place in a table, but no farther from its front than a row's blocks go."""
        most = self._most[group]
        return place if most is None else min(place, sequence.tables[group].first + most)

    def _adopt(self, sequence: SequenceBlocks, match: Match, loaded: int) -> tuple[Entry | None, Entry | None]:
        """Give a new sequence the blocks of a match. Returns the partial entry: as the first, if its block must be
        copied, or as the second, if the block is now the sequence's own.
        """
        sequence.registered = len(match.entries)
        sequence.parent = match.last
        sequence.length = max(match.tokens(self.block_size), loaded)
        partial = None if loaded else match.partial
        copied = partial is None or len(partial.tokens) == self.block_size or self._owned(partial)
        for group, (pool, table) in enumerate(zip(self._pools, sequence.tables, strict=True)):
            table.first = self._front(group, sequence.length)
            for place in range(table.first, len(match.entries) + (not copied)):
                pool.share(table, match.block(place).blocks[group])
        return (partial, None) if copied else (None, partial)

    def let_go_sources(self) -> None:
        """Let the sources of all copies be evicted again: what is planned from now on is carried out after them."""
        for pool in self._pools:
            for block in list(pool.sources):
                pool.let_go_source(block)

    def _owned(self, cached: Entry) -> bool:
        """Whether a cached block belongs to a sequence, or is the source of a copy, in some group."""
        pairs = zip(self._pools, cached.blocks, strict=True)
        return any(block != GONE and (pool.ref_counts[block] or block in pool.sources) for pool, block in pairs)

    def load(self, seq: int, load: DiskLoad, tokens: Sequence[int], keys: Sequence[Key]) -> tuple[PieceLoad, ...]:
        """A sequence of `tokens` that has begun with as many `loaded` tokens as were found below: they are cached like
        those that it computes. Returns what the caller must bring into the arena before the next step.
        """
        sequence, lower = self._sequences[seq], self.lower
        assert lower is not None
        first, loads = sequence.registered, []
        for group, table in enumerate(sequence.tables):
            places = range(max(table.first, first), load.loaded)
            loads += [PieceLoad(group, table.at(place), load.piece(place, group)) for place in places]
        if lower.states:
            sequence.snapshot = self.states.make(seq, sequence.length)
            assert sequence.snapshot is not None  # else nothing is asked of the tier below
            loads.append(PieceLoad(STATE, sequence.snapshot, load.piece(load.loaded - 1, STATE)))
        self.register(seq, tokens, sequence.length, keys)
        entry = sequence.parent
        for _ in range(sequence.registered - first):
            assert isinstance(entry, Entry)  # as many predecessors as registered blocks
            for group, _piece in tuple(lower.new_pieces(entry)):
                lower.stored(entry, group)
            entry = entry.parent
        return tuple(loads)

    def register(self, seq: int, tokens: Sequence[int], stored: int, keys: Sequence[Key] = ()) -> None:
        """Let others share the full blocks of a sequence whose first `stored` tokens are in the arena (or will be,
        before anyone reads them). `keys` are the known keys of its blocks.
        """
        sequence = self._sequences[seq]
        for index in range(sequence.registered, stored // self.block_size):
            content = tokens[index * self.block_size : (index + 1) * self.block_size]
            cached = self._cache(sequence, index, content, keys[index] if index < len(keys) else None)
            if cached is None:
                return
            sequence.parent = cached
            sequence.registered = index + 1
            self.states.hang(sequence, cached, index)
            if self.lower is not None:
                self.lower.cached(cached)

    def _cache(self, sequence: SequenceBlocks, index: int, content: Sequence[int], key: Key | None) -> Entry | None:
        """The entry of a sequence's block, which lends it the blocks that it has not (any more). None if there is none:
        its key is taken.
        """
        blocks = sequence.blocks_at(index)
        each = list(zip(self._pools, blocks, strict=True))
        if set(blocks) != {GONE} and not any(block in pool.cached for pool, block in each):
            entry = self.prefix.insert(sequence.parent, content, blocks, key)
            if entry is not None:
                for pool, block in each:
                    if block != GONE:
                        pool.cached[block] = entry
                return entry
        entry = self.prefix.find(sequence.parent, content)
        if entry is not None and GONE in entry.blocks:
            lent = [there == GONE != b and b not in p.cached for there, (p, b) in zip(entry.blocks, each, strict=True)]
            entry.blocks = tuple(b if new else old for new, b, old in zip(lent, blocks, entry.blocks, strict=True))
            for new, (pool, block) in zip(lent, each, strict=True):
                if new:
                    pool.cached[block] = entry
        return entry

    def release_blocks(
        self, seq: int, tokens: Sequence[int], stored: int, keys: Sequence[Key] = (), passed: bool = False
    ) -> None:
        """End a sequence and keep what it computed for others: its full blocks and its partial one. See `free`."""
        self.register(seq, tokens, stored, keys)
        sequence = self._sequences[seq]
        full = stored // self.block_size
        rest = tokens[full * self.block_size : stored]
        if rest and sequence.registered == full:
            self.states.hang(sequence, self._cache(sequence, full, rest, None), full)
        self.free(seq, passed)

    def reserve(self, seq: int, tokens: int) -> None:
        """Make room for `tokens` tokens in all, growing the last run in place or adding runs. What lies behind windows
        is given up. Raises KVCacheFull; then nothing else changed.
        """
        sequence = self._sequences[seq]
        self._pass_by(sequence)
        self._reserve(sequence, tokens)

    def append(self, seq: int, tokens: int) -> None:
        """Record that the sequence is `tokens` tokens longer, reserving room for them. Raises KVCacheFull; then
        nothing changed.
        """
        sequence = self._sequences[seq]
        self._reserve(sequence, sequence.length + tokens)
        sequence.length += tokens

    def truncate(self, seq: int, tokens: int) -> None:
        """Cut a sequence back to its first `tokens` tokens. None of the others may be cached, or have left a state.
        Their blocks stay the sequence's.
        """
        sequence = self._sequences[seq]
        if not sequence.registered * self.block_size <= tokens <= sequence.length:
            raise ValueError(
                f"sequence {seq} has {sequence.length} tokens, of which {sequence.registered * self.block_size} are "
                f"cached, and cannot be cut back to {tokens}"
            )
        sequence.length = tokens

    def room(self, seq: int) -> int:
        """Tokens that the sequence can have in all before another must give up blocks."""
        sequence = self._sequences[seq]
        self._pass_by(sequence)
        return min(t.end + self.obtainable(g) for g, t in enumerate(sequence.tables)) * self.block_size

    def _pass_by(self, sequence: SequenceBlocks) -> None:
        """Give up the blocks that nothing sees that comes after the sequence's tokens."""
        for group in self._windows:
            passed = sequence.tables[group].pass_by(self._front(group, sequence.length))
            self._pools[group].give_up(passed, passed=True)

    def give_back(self, seq: int, tokens: int = 0) -> int:
        """Free the blocks beyond the sequence's length, or beyond `tokens` if that is more. Returns how many blocks
        that freed.
        """
        sequence = self._sequences[seq]
        keep = self.blocks_for(max(sequence.length, tokens))
        return sum(p.give_up(table.cut(keep)) for p, table in zip(self._pools, sequence.tables, strict=True))

    def can_fork(self, parent: int, tokens: int) -> bool:
        """Whether the parent still has all that the token after its first `tokens` ones sees, and the state there."""
        return not self._passed(parent, tokens) and self.states.can_fork(parent, tokens)

    def _passed(self, seq: int, tokens: int) -> bool:
        tables = self._sequences[seq].tables
        return any(tables[group].first > self._front(group, tokens) for group in self._windows)

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
        if self._passed(parent, length):
            raise ValueError(f"sequence {parent} has {source.length} tokens, and windows have passed those at {length}")
        full, rest = divmod(length, self.block_size)
        sequence = self._sequences[child] = SequenceBlocks(len(self.groups), source.parent)
        sequence.length = length
        self.states.fork(source, sequence)
        sequence.registered = min(full, source.registered)
        for _ in range(source.registered - sequence.registered):
            assert isinstance(sequence.parent, Entry)  # as many predecessors as registered blocks
            sequence.parent = sequence.parent.parent
        for group, (pool, table) in enumerate(zip(self._pools, sequence.tables, strict=True)):
            table.first = self._front(group, length)
            for place in range(table.first, full):
                pool.share(table, source.tables[group].at(place))
        try:
            self._reserve(sequence, length)
        except KVCacheFull:
            self.free(child)
            raise
        if not rest:
            return ()
        pairs = zip(source.blocks_at(full), sequence.blocks_at(full), strict=True)
        return copies_of([{old: new} for old, new in pairs])

    def free(self, seq: int, passed: bool = False) -> None:
        """End a sequence: each of its blocks loses one owner. Without owners, a cached block waits to be used again
        or evicted, and any other goes back to the allocator. Those of a text that is `passed` go before the arena grows
        and before all others; like theirs, the last of it first.
        """
        sequence = self._sequences.pop(seq)
        self.states.drop(sequence.states)
        for pool, table in zip(self._pools, sequence.tables, strict=True):
            pool.give_up(table.blocks[::-1] if passed else table.blocks, passed)
            if passed and self.lower is not None:
                self.lower.passed(pool.passed[block] for block in table.blocks if block in pool.passed)

    def _forgot(self, entry: Entry) -> None:
        self.states.drop(entry.states)

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

    # -- looking inside -----------------------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Raise AssertionError if counts, tables and allocators disagree: for tests and debug runs."""
        check_invariants(self.groups, self._pools, self._sequences, self.prefix)
        self.states.check_invariants(self.prefix.states)

    # -- blocks in and out --------------------------------------------------------------------------------------------

    def _reserve(self, sequence: SequenceBlocks, tokens: int) -> None:
        place = -(-tokens // self.block_size)
        for table in sequence.tables:
            if table.first + len(table.blocks) < place:  # `table.end`: this is asked of each row in each step
                self._grow(sequence, need := [place] * len(self.groups), need)
                return

    def _grow(self, sequence: SequenceBlocks, need: Sequence[int], want: Sequence[int]) -> None:
        """Bring every table to its first `need` places, or to `want` if one run holds them; all groups or none."""
        before = [table.end for table in sequence.tables]
        try:
            for group, (pool, table) in enumerate(zip(self._pools, sequence.tables, strict=True)):
                if need[group] > table.end:
                    self._make_room(group, need[group] - table.end)
                    pool.extend(table, need[group], max(need[group], want[group]))
        except KVCacheFull:
            for pool, table, place in zip(self._pools, sequence.tables, before, strict=True):
                pool.give_up(table.cut(place))
            raise
