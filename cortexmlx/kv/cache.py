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
    """Blocks summed over all layer groups. `shared_blocks` have more than one owner."""

    total_blocks: int
    used_blocks: int
    free_blocks: int
    shared_blocks: int
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
    """A sequence's tables (one per group) and its length in tokens."""

    __slots__ = ("length", "tables")

    def __init__(self, groups: int) -> None:
        self.tables = [_Table() for _ in range(groups)]
        self.length = 0


class KVCache:
    """Block tables and reference counts of every sequence, for all layer groups at once.

    `blocks` blocks of `block_size` tokens are available in each group. Sequences are named by an integer of the
    caller's choice.
    """

    def __init__(self, groups: Sequence[LayerGroup], blocks: int, block_size: int) -> None:
        self.groups = tuple(groups)
        self.block_size = block_size
        self.blocks = blocks
        self._allocators = [KVBlockAllocator(blocks) for _ in groups]
        self._counts = [np.zeros(blocks, np.int32) for _ in groups]
        self._sequences: dict[int, _Sequence] = {}

    # -- the life of a sequence ---------------------------------------------------------------------------------------

    def allocate_for(self, seq: int, tokens: int, headroom: int = 0) -> None:
        """Begin a sequence with room for `tokens` tokens, in one contiguous run per group where there is one.

        `headroom` more tokens are taken too if they fit into the same run. Raises KVCacheFull with the numbers; then
        nothing changed.
        """
        if seq in self._sequences:
            raise ValueError(f"sequence {seq} already has blocks")
        self._sequences[seq] = _Sequence(len(self.groups))
        try:
            self._grow(seq, self.blocks_for(tokens), self.blocks_for(tokens + headroom))
        except KVCacheFull:
            del self._sequences[seq]
            raise

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

    def truncate(self, seq: int, length: int) -> None:
        """Forget the tokens from `length` on. Their blocks stay reserved."""
        entry = self._sequences[seq]
        if not 0 <= length <= entry.length:
            raise ValueError(f"sequence {seq} has {entry.length} tokens and cannot be cut to {length}")
        entry.length = length

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

    def fork(self, parent: int, child: int) -> tuple[BlockCopy, ...]:
        """Begin `child` as a copy of `parent`: full blocks are shared, the partial one is copied.

        Returns the copies that the caller must make in the arena. Raises KVCacheFull; then nothing changed.
        """
        source = self._sequences[parent]
        if child in self._sequences:
            raise ValueError(f"sequence {child} already has blocks")
        full, rest = divmod(source.length, self.block_size)
        fresh: list[int] = []
        if rest:
            try:
                for allocator in self._allocators:
                    fresh.append(allocator.allocate(1).start)
            except KVCacheFull:
                for allocator, block in zip(self._allocators, fresh, strict=False):
                    allocator.free(KVHandle(block, 1))
                raise
        entry = _Sequence(len(self.groups))
        entry.length = source.length
        copies = []
        for group, (table, counts) in enumerate(zip(source.tables, self._counts, strict=True)):
            shared = table.blocks[:full]
            counts[shared] += 1
            entry.tables[group].blocks = list(shared)
            if rest:
                counts[fresh[group]] = 1
                entry.tables[group].blocks.append(fresh[group])
                copies.append(BlockCopy(group, table.blocks[full], fresh[group]))
        self._sequences[child] = entry
        return tuple(copies)

    def free(self, seq: int) -> None:
        """End a sequence: each of its blocks loses one owner, and goes back to the allocator when that was the last."""
        entry = self._sequences.pop(seq)
        for group, table in enumerate(entry.tables):
            self._release(group, table.blocks)

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
        """Blocks free in the fullest group: what a new sequence can count on."""
        return min(a.free_blocks for a in self._allocators)

    @property
    def capacity_tokens(self) -> int:
        """Tokens that one sequence alone could have."""
        return self.blocks * self.block_size

    def allocator(self, group: int) -> KVBlockAllocator:
        """The group's allocator."""
        return self._allocators[group]

    def stats(self) -> CacheStats:
        """Counts over all groups, at this moment."""
        entries = self._sequences.values()
        return CacheStats(
            total_blocks=sum(a.total_blocks for a in self._allocators),
            used_blocks=sum(a.used_blocks for a in self._allocators),
            free_blocks=sum(a.free_blocks for a in self._allocators),
            shared_blocks=sum(int((c > 1).sum()) for c in self._counts),
            sequences=len(self._sequences),
            tokens=sum(e.length for e in entries),
            single_run_sequences=sum(all(t.single_run() for t in e.tables) for e in entries),
            fragmentation=max(a.fragmentation() for a in self._allocators),
        )

    def dump(self) -> tuple[str, ...]:
        """One readable line per sequence: tokens, capacity and its runs as `start+count`."""
        lines = []
        for seq, entry in self._sequences.items():
            runs = " | ".join(" ".join(f"{h.start}+{h.count}" for h in _runs(t.blocks)) for t in entry.tables)
            lines.append(f"sequence {seq}: {entry.length}/{self.capacity(seq)} tokens, blocks {runs}")
        return tuple(lines)

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
            assert int((counts > 0).sum()) == allocator.used_blocks, f"group {group}: used blocks without an owner"

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
        if need - have > allocator.free_blocks:
            raise KVCacheFull(
                f"the KV cache is full: {need - have} more blocks of {self.block_size} tokens are needed, "
                f"{allocator.free_blocks} of {allocator.total_blocks} are free; "
                "raise the KV memory (--kv-memory) or run fewer requests at once"
            )
        while have < need:
            added = None
            for count in dict.fromkeys((want - have, need - have)):
                if table.blocks and (grown := allocator.extend(KVHandle(table.blocks[-1], 1), count)) is not None:
                    added = KVHandle(grown.start + 1, count)
                elif allocator.largest_free_run >= count:
                    added = allocator.allocate(count)
                if added is not None:
                    break
            else:
                added = allocator.allocate(min(need - have, allocator.largest_free_run))
            self._counts[group][added.start : added.start + added.count] = 1
            table.blocks.extend(range(added.start, added.start + added.count))
            have = len(table.blocks)

    def _release(self, group: int, blocks: list[int]) -> int:
        """Take one owner from each block; free those that have none left, run by run. Returns how many were freed."""
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
