"""Statistics and consistency checks of the KV cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cortexmlx.kv.pool import BlockPool
from cortexmlx.kv.prefix import GONE, PrefixCache
from cortexmlx.kv.spec import Counts, LayerGroup
from cortexmlx.kv.table import SequenceBlocks
from cortexmlx.stats import BlockMap, BlockState, GroupBlocks


@dataclass(frozen=True)
class CacheStats:
    """Blocks and sequences, summed over all layer groups."""

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


def cache_stats(pools: Sequence[BlockPool], sequences: Mapping[int, SequenceBlocks]) -> CacheStats:
    """Return the counts over all groups."""
    entries = sequences.values()
    used, total = sum(p.owned for p in pools), sum(p.allocator.total_blocks for p in pools)
    return CacheStats(
        total_blocks=total,
        used_blocks=used,
        shared_blocks=sum(int((p.ref_counts > 1).sum()) for p in pools),
        cached_blocks=sum(p.evictable for p in pools),
        free_blocks=total - used,
        sequences=len(sequences),
        tokens=sum(e.length for e in entries),
        single_run_sequences=sum(e.single_run() for e in entries),
        fragmentation=max(p.allocator.fragmentation() for p in pools),
    )


def block_map(block_size: int, groups: Sequence[LayerGroup], pools: Sequence[BlockPool], limits: Counts) -> BlockMap:
    """Return the state of every block. Costs a pass over all counts and all cached blocks."""
    pictures = []
    for group, (layers, pool, limit) in enumerate(zip(groups, pools, limits, strict=True)):
        states = np.minimum(pool.ref_counts, int(BlockState.SHARED)).astype(np.uint8)
        for waiting in pool.queues:
            blocks = np.fromiter(waiting, np.intp, len(waiting))
            on_disk = np.fromiter((group in entry.on_disk for entry in waiting.values()), bool, len(waiting))
            states[blocks] = np.where(on_disk, BlockState.STORED, BlockState.CACHED)
        bytes_each = block_size * layers.bytes_per_token
        pictures.append(GroupBlocks(len(layers.layers), layers.spec.window, bytes_each, limit, states.tobytes()))
    return BlockMap(block_size, tuple(pictures))


def check_invariants(
    groups: Sequence[LayerGroup],
    pools: Sequence[BlockPool],
    sequences: Mapping[int, SequenceBlocks],
    prefix: PrefixCache,
) -> None:
    """Raise AssertionError if counts, tables, allocators and the prefix cache disagree."""
    block_size = prefix.block_size
    for group, pool in enumerate(pools):
        attention_window = groups[group].spec.attention_window
        owners = np.zeros(len(pool.ref_counts), np.int32)
        for seq, sequence in sequences.items():
            table = sequence.tables[group]
            assert len(set(table.blocks)) == len(table.blocks), f"sequence {seq} holds a block twice"
            assert table.end * block_size >= sequence.length, f"sequence {seq} is longer than its blocks"
            assert table.first * block_size <= attention_window.oldest(sequence.length), (
                f"sequence {seq} lacks what it sees"
            )
            owners[table.blocks] += 1
        assert (owners == pool.ref_counts).all(), f"group {group}: counts do not match the tables"
        free, waiting = pool.list_free(), [block for queue in pool.queues for block in queue]
        uses = pool.ref_counts.copy()
        uses[free] += 1
        uses[waiting] += 1
        uses[list(pool.sources)] += 1
        assert (uses > 0).all(), f"group {group}: blocks {np.flatnonzero(uses == 0)} are lost"
        assert not (pool.ref_counts[free].any() or pool.ref_counts[waiting].any()), (
            f"group {group}: a block in use may be taken"
        )
        assert not pool.sources.keys() & {*free, *waiting}, f"group {group}: the source of a copy may be taken"
        assert len({*free, *waiting}) == len(free) + len(waiting), f"group {group}: a cached block is free"
        assert all(pool.cached.get(b) is e for queue in pool.queues for b, e in queue.items()), (
            f"group {group}: what is gone waits to go"
        )
        assert all(entry.transient for entry in pool.transient.values()), f"group {group}: a block goes too early"
        last = {block for block in waiting if pool.cached[block].key in pool.pins}
        assert last == set(pool.pinned), f"group {group}: what is pinned does not go last"
        held = {entry.blocks[group]: entry for entry in prefix.entries if entry.blocks[group] != GONE}
        assert len(held) == sum(entry.blocks[group] != GONE for entry in prefix.entries), "a block has two entries"
        assert pool.cached == held, f"group {group}: a cached block does not lead to its entry"
        if attention_window.tokens is None:
            assert len(held) == len(prefix), f"group {group}: an entry has no block"
    hollow = [entry for entry in prefix.entries if set(entry.blocks) == {GONE}]
    assert all(entry.children for entry in hollow), "an entry without blocks leads nowhere"
    prefix.check_invariants()
