"""The cache's books: all groups or none, where blocks lie, what a copy holds. Random use: `test_prefix_machine.py`."""

from __future__ import annotations

import pytest

from cortexmlx.errors import KVCacheFull
from cortexmlx.kv.cache import KVCache
from cortexmlx.kv.pools import BlockPools
from cortexmlx.kv.spec import KVSpec, LayerGroup
from support.scheduling.blocks import cached_text, capacity


def groups(count: int) -> tuple[LayerGroup, ...]:
    return tuple(LayerGroup(KVSpec(1, 4 + i, 4, "float32"), (i,)) for i in range(count))


def test_a_second_group_that_is_full_leaves_the_first_as_it_was() -> None:
    cache = KVCache(BlockPools(groups(2), 4, 8))
    cache.pools[1].allocator.allocate(3)
    with pytest.raises(KVCacheFull, match="2 more blocks of 8 tokens are needed, 1 of 4 are free"):
        cache.allocate_for(1, 16)
    assert (cache.pools[0].allocator.free_blocks, cache.pools[1].allocator.free_blocks) == (4, 1)
    cache.allocate_for(2, 8)
    with pytest.raises(KVCacheFull):
        cache.append(2, 9)
    assert (cache.tables.length(2), capacity(cache, 2)) == (0, 8)
    with pytest.raises(ValueError, match="sequence 2 already has blocks"):
        cache.allocate_for(2, 8)


def test_a_sequence_that_finds_no_room_gives_back_the_partial_block_that_it_would_have_made_its_own() -> None:
    cache = KVCache(BlockPools(groups(1), 4, 4))
    text = list(range(6))
    cached_text(cache, text)
    cache.allocate_for(1, 8)
    match = cache.match([*text, 7, 8, *range(20)], cache.prefix.keys([*text, 7, 8, *range(20)]), 20)
    assert match.partial is not None and match.partial_tokens == 2
    with pytest.raises(KVCacheFull):
        cache.allocate_for(2, 20, match=match)
    again = cache.match([*text, 9], cache.prefix.keys([*text, 9]), 6)
    assert (len(again.entries), again.partial_tokens) == (1, 2)
    cache.check_invariants()
    assert cache.stats().cached_blocks == 2


@pytest.mark.parametrize("again", [False, True])
def test_the_source_of_a_copy_is_nobodys_until_all_of_a_step_is_planned(again: bool) -> None:
    """Not even if another sequence begins with it, and ends, meanwhile."""
    cache = KVCache(BlockPools(groups(1), 4, 4))
    whole, text = list(range(5)), [0, 1, 2, 9]
    cached_text(cache, whole)
    (copy,) = cache.allocate_for(1, 4, match=cache.match(text, cache.prefix.keys(text), 3))
    if again:
        cache.allocate_for(2, 5, match=cache.match(whole, cache.prefix.keys(whole), 4))
        cache.free(2)
    tokens = 4 * (cache.pools.obtainable_blocks(0) + 1)
    with pytest.raises(KVCacheFull):
        cache.allocate_for(3, tokens)
    cache.release_copy_sources()
    cache.allocate_for(3, tokens)
    assert copy.source in cache.tables.block_table(3, 0)
    cache.check_invariants()


def test_the_counts_are_those_of_blocks_and_sequences() -> None:
    """Six tokens that nobody uses in blocks 0 and 1, and a sequence of eight in blocks 2 and 3, and its fork."""
    cache = KVCache(BlockPools([LayerGroup(KVSpec(1, 4, 4, "float32"), (0,))], 6, 4))
    cached_text(cache, list(range(6)))
    cache.allocate_for(7, 8)
    cache.append(7, 8)
    cache.fork(7, 8, 4)
    stats = cache.stats()
    assert (stats.total_blocks, stats.used_blocks, stats.shared_blocks) == (6, 2, 1)
    assert (stats.cached_blocks, stats.free_blocks) == (2, 4), "what is cached and unused counts as free"
    assert (stats.sequences, stats.tokens, stats.single_run_sequences) == (2, 12, 2)
    assert cache.pools.block_counts == (stats.used_blocks, stats.cached_blocks, stats.free_blocks)
    assert stats.fragmentation == 0.0
