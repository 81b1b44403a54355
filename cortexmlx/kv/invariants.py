"""Looking into the cache: counts at this moment, and a check that tables, counts and allocators fit together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cortexmlx.kv.pool import BlockPool
from cortexmlx.kv.prefix import PrefixCache
from cortexmlx.kv.table import SequenceBlocks


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


def block_counts(pools: Sequence[BlockPool], prefix: PrefixCache) -> tuple[int, int, int]:
    """Used, cached and free blocks, as in `CacheStats`: O(1) however many there are."""
    cached = prefix.unused * len(pools)
    used = sum(p.allocator.used_blocks for p in pools) - cached
    return used, cached, sum(p.allocator.total_blocks for p in pools) - used


def cache_stats(pools: Sequence[BlockPool], sequences: Mapping[int, SequenceBlocks], prefix: PrefixCache) -> CacheStats:
    """Counts over all groups, at this moment."""
    entries = sequences.values()
    used, cached, free = block_counts(pools, prefix)
    return CacheStats(
        total_blocks=used + free,
        used_blocks=used,
        shared_blocks=sum(int((p.ref_counts > 1).sum()) for p in pools),
        cached_blocks=cached,
        free_blocks=free,
        sequences=len(sequences),
        tokens=sum(e.length for e in entries),
        single_run_sequences=sum(e.single_run() for e in entries),
        fragmentation=worst_fragmentation(pools),
    )


def worst_fragmentation(pools: Sequence[BlockPool]) -> float:
    """That of the worst group: `1 - longest free run / free blocks`."""
    return max(p.allocator.fragmentation() for p in pools)


def check_invariants(
    pools: Sequence[BlockPool], sequences: Mapping[int, SequenceBlocks], prefix: PrefixCache, block_size: int
) -> None:
    """Raise AssertionError if counts, tables, allocators and the prefix cache disagree."""
    for group, pool in enumerate(pools):
        owners = np.zeros(len(pool.ref_counts), np.int32)
        for seq, sequence in sequences.items():
            blocks = sequence.tables[group].blocks
            assert len(set(blocks)) == len(blocks), f"sequence {seq} holds a block twice"
            assert len(blocks) * block_size >= sequence.length, f"sequence {seq} is longer than its blocks"
            owners[blocks] += 1
        assert (owners == pool.ref_counts).all(), f"group {group}: counts do not match the tables"
        free = pool.list_free()
        waiting = [blocks[group] for blocks in prefix.unused_blocks]
        uses = pool.ref_counts.copy()
        uses[free] += 1
        uses[waiting] += 1
        assert (uses > 0).all(), f"group {group}: blocks {np.flatnonzero(uses == 0)} are lost"
        assert not (pool.ref_counts[free].any() or pool.ref_counts[waiting].any()), (
            f"group {group}: a block in use may be taken"
        )
        assert len({*free, *waiting}) == len(free) + len(waiting), f"group {group}: a cached block is free"
    prefix.check_invariants()
