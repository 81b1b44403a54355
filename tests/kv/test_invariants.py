"""The check of the cache's books: every kind of disagreement is noticed."""

from __future__ import annotations

import pytest

from cortexmlx.kv.allocator import KVHandle
from cortexmlx.kv.cache import KVCache
from cortexmlx.kv.spec import KVSpec, LayerGroup
from support.blocks import cached_text


def groups(count: int) -> tuple[LayerGroup, ...]:
    return tuple(LayerGroup(KVSpec(1, 4 + i, 4, "float32"), (i,)) for i in range(count))


def broken(cache: KVCache, how: str) -> None:
    entry = cache.prefix.entry_of(0)
    assert entry is not None
    if how == "a lost block":
        cache.prefix.acquire(entry)
    elif how == "a cached block that is free":
        cache.allocator(0).free(KVHandle(entry.blocks[0], 1))
    elif how == "a used block that may be evicted":
        cache._pools[0].ref_counts[entry.blocks[0]] += 1
    elif how == "other tokens under a key":
        entry.tokens = (9, *entry.tokens[1:])
    elif how == "a block of two entries":
        cache.prefix._by_block[1] = entry
    else:
        entry.parent.children.clear()


@pytest.mark.parametrize(
    "how",
    [
        "a lost block",
        "a cached block that is free",
        "a used block that may be evicted",
        "other tokens under a key",
        "a block of two entries",
        "an entry that cannot be reached",
    ],
)
def test_the_books_are_checked(how: str) -> None:
    cache = KVCache(groups(1), 4, 4)
    cached_text(cache, list(range(6)))
    cache.check_invariants()
    broken(cache, how)
    with pytest.raises(AssertionError):
        cache.check_invariants()
