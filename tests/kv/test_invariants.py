"""The check of the cache's books: every kind of disagreement is noticed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cortexmlx.kv.allocator import KVHandle
from cortexmlx.kv.cache import KVCache
from cortexmlx.kv.pools import BlockPools
from cortexmlx.kv.prefix import Entry, Node
from cortexmlx.kv.spec import KVSpec, LayerGroup
from support.scheduling.blocks import cached_text

SEQ = 7


def books() -> KVCache:
    """Six tokens that nobody uses in blocks 0 and 1, and a sequence of eight in blocks 2 and 3."""
    cache = KVCache(BlockPools([LayerGroup(KVSpec(1, 4, 4, "float32"), (0,))], 6, 4))
    cached_text(cache, list(range(6)))
    cache.allocate_for(SEQ, 8)
    cache.append(SEQ, 8)
    return cache


def entry(cache: KVCache, block: int = 0) -> Entry:
    return cache.pools[0].cached[block]


def hold_twice(cache: KVCache) -> None:
    cache.tables.sequences[SEQ].tables[0].blocks[1] = 2


def be_longer(cache: KVCache) -> None:
    cache.tables.sequences[SEQ].length = 9


def count_one_more(cache: KVCache) -> None:
    cache.pools[0].ref_counts[2] += 1


def lose(cache: KVCache) -> None:
    cache.pools[0].hold(0)


def free_what_is_used(cache: KVCache) -> None:
    cache.pools[0].allocator.free(KVHandle(2, 1))


def evict_what_is_used(cache: KVCache) -> None:
    cache.register(SEQ, list(range(20, 28)), 8)
    cache.pools[0].unused[2] = entry(cache, 2)


def free_what_is_cached(cache: KVCache) -> None:
    cache.pools[0].allocator.free(KVHandle(0, 1))


def cache_twice(cache: KVCache) -> None:
    entry(cache, 1).blocks = (0,)


def lose_what_is_seen(cache: KVCache) -> None:
    pool, table = cache.pools[0], cache.tables.sequences[SEQ].tables[0]
    pool.give_up(table.pass_by(1), passed=True)


def change_tokens(cache: KVCache) -> None:
    entry(cache).tokens = (9, 1, 2, 3)


def forget_a_successor(cache: KVCache) -> None:
    entry(cache).parent.children.clear()


def begin_elsewhere(cache: KVCache) -> None:
    first = entry(cache)
    first.parent = Node(first.parent.key, children=first.parent.children)


def swap(cache: KVCache) -> None:
    pool = cache.pools[0]
    pool.cached[0], pool.cached[1] = pool.unused[0], pool.unused[1] = pool.cached[1], pool.cached[0]


def hold_more_than_a_block(cache: KVCache) -> None:
    found = cache.prefix.insert(cache.prefix.root(), range(30, 35), (2,))
    assert found is not None
    cache.pools[0].cached[2] = found


def wait_although_gone(cache: KVCache) -> None:
    cache.prefix.remove(entry(cache, 1))
    del cache.pools[0].cached[1]


DAMAGE: dict[Callable[[KVCache], None], str] = {
    hold_twice: "sequence 7 holds a block twice",
    be_longer: "sequence 7 is longer than its blocks",
    count_one_more: "counts do not match the tables",
    lose: r"blocks \[0\] are lost",
    free_what_is_used: "a block in use may be taken",
    evict_what_is_used: "a block in use may be taken",
    free_what_is_cached: "a cached block is free",
    cache_twice: "a block has two entries",
    lose_what_is_seen: "sequence 7 lacks what it sees",
    change_tokens: "under a key that is not its own",
    forget_a_successor: "not among its parent's successors",
    begin_elsewhere: "an entry's root is not its salt's",
    swap: "does not lead to its entry",
    hold_more_than_a_block: "more tokens than a block",
    wait_although_gone: "what is gone waits to go",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_every_disagreement_is_noticed_by_name(damage: Callable[[KVCache], None]) -> None:
    cache = books()
    cache.check_invariants()
    damage(cache)
    with pytest.raises(AssertionError, match=DAMAGE[damage]):
        cache.check_invariants()


def test_the_counts_are_those_of_the_books() -> None:
    cache = books()
    cache.fork(SEQ, 8, 4)
    stats = cache.stats()
    assert (stats.total_blocks, stats.used_blocks, stats.shared_blocks) == (6, 2, 1)
    assert (stats.cached_blocks, stats.free_blocks) == (2, 4), "what is cached and unused counts as free"
    assert (stats.sequences, stats.tokens, stats.single_run_sequences) == (2, 12, 2)
    assert cache.pools.block_counts == (stats.used_blocks, stats.cached_blocks, stats.free_blocks)
    assert stats.fragmentation == 0.0
