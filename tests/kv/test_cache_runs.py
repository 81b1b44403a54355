"""A sequence's blocks in the cache: in one run where they can be, shared by forks, and moved together."""

from __future__ import annotations

from cortexmlx.kv.cache import KVCache
from cortexmlx.kv.pools import BlockPools
from cortexmlx.kv.prefix import PrefixCache
from cortexmlx.kv.spec import KVSpec, LayerGroup
from support.scheduling.blocks import capacity

LAYER = LayerGroup(KVSpec(1, 4, 4, "float32"), (0,))


def test_headroom_keeps_neighbours_apart_and_is_handed_back() -> None:
    cache = KVCache(BlockPools([LAYER], 32, block_size=4))
    for seq in (0, 1):
        cache.allocate_for(seq, 8, headroom=16)
        cache.append(seq, 8)
    for _ in range(4):
        cache.append(0, 4)
        cache.append(1, 4)
    assert [cache.tables.find_run(seq, 0, 24) is not None for seq in (0, 1)] == [True, True]
    cache.allocate_for(2, 8, headroom=16)
    cache.append(2, 8)
    assert (capacity(cache, 2), cache.free_spare_blocks(2), capacity(cache, 2)) == (24, 4, 8)


def test_headroom_is_only_taken_where_it_fits_into_the_run() -> None:
    cache = KVCache(BlockPools([LAYER], 10, block_size=4))
    cache.allocate_for(0, 32, headroom=100)
    assert capacity(cache, 0) == 32


def test_a_row_without_room_beside_it_goes_on_in_a_second_run() -> None:
    cache = KVCache(BlockPools([LAYER], 12, block_size=4))
    for seq in (0, 1):
        cache.allocate_for(seq, 8)
        cache.append(seq, 8)
    cache.append(0, 8)
    assert cache.tables.describe(0) == "0+2 4+2" and cache.tables.find_run(0, 0, 16) is None
    assert cache.stats().single_run_sequences == 1


def test_growing_in_place_comes_before_a_run_with_headroom_elsewhere() -> None:
    cache = KVCache(BlockPools([LAYER], 20, block_size=4))
    for seq in (0, 1):
        cache.allocate_for(seq, 8)
        cache.append(seq, 8)
    cache.free(0)
    cache.allocate_for(2, 4, headroom=8)
    assert cache.tables.describe(2) == "4+3", "the hole of two blocks does not hold the headroom"
    cache.free(2)
    cache.allocate_for(3, 4)
    cache.append(3, 4)
    cache._extend_tables(cache.tables.sequences[3], [2], [5])
    assert cache.tables.describe(3) == "0+2", "one block more is there, four more are not"


def test_sequences_move_too_and_shared_blocks_stay_shared() -> None:
    groups = [LayerGroup(KVSpec(1, 4 + i, 4, "float32"), (i,)) for i in range(2)]
    cache = KVCache(BlockPools(groups, 16, 4, prefix=PrefixCache(4)))
    for seq in range(3):
        cache.allocate_for(seq, 12)
        cache.append(seq, 12)
    cache.fork(2, 3, 8)
    cache.free(0)
    cache.free(1)
    where = {(c.group, c.source): c.target for c in cache.compact()}
    assert where == {(g, 6 + i): i for g in range(2) for i in range(3)}
    assert [cache.tables.block_table(seq, 1).tolist() for seq in (2, 3)] == [[0, 1, 2], [0, 1]]
    assert cache.stats().shared_blocks == 4
    cache.check_invariants()


def test_a_fork_inside_cached_blocks_goes_on_with_their_chain() -> None:
    """The blocks that a child adds must never look like the beginning of a text, even when the parent's are evicted."""
    cache = KVCache(BlockPools([LAYER], 8, block_size=4))
    text = [1, 2, 3, 4, 5, 6, 7, 8]
    keys = cache.prefix.keys(text)
    cache.allocate_for(1, 8)
    cache.append(1, 8)
    cache.register(1, text, 8, keys)
    cache.fork(1, 2, 7)
    cache.free(1)
    cache.pools.drop_cached()
    cache.append(2, 1)
    cache.register(2, text, 8, keys)
    late = [5, 6, 7, 8, 9]
    assert cache.match(late, cache.prefix.keys(late), 4).partial is None
    again = cache.match([*text, 9], keys, 8)
    assert [e.blocks for e in again.entries] == [(b,) for b in cache.tables.block_table(2, 0).tolist()]
