"""The prefix cache alone: what blocks are called, and in which order they go."""

from __future__ import annotations

import numpy as np

from cortexmlx.kv.cache import KVCache
from cortexmlx.kv.pools import BlockPools
from cortexmlx.kv.prefix import PrefixCache, chain_hash
from cortexmlx.kv.spec import KVSpec, LayerGroup

LAYER = LayerGroup(KVSpec(1, 4, 4, "float32"), (0,))


def test_a_block_in_another_place_has_another_key() -> None:
    cache = PrefixCache(4)
    assert len(set(cache.keys([1, 2, 3, 4] * 3))) == 3


def test_what_was_used_last_goes_last_and_ends_go_before_beginnings() -> None:
    cache = KVCache(BlockPools([LAYER], 12, block_size=2))
    texts = [[i] * 6 for i in (1, 2, 3)]
    for seq, text in enumerate(texts):
        cache.allocate_for(seq, 6)
        cache.append(seq, 6)
        cache.cache_and_free(seq, text, 6)
    hit = cache.match(texts[0], cache.prefix.keys(texts[0]), 6)
    cache.allocate_for(9, 6, match=hit)
    cache.free(9)

    def found() -> list[int]:
        return [len(cache.match(t, cache.prefix.keys(t), 6).entries) for t in texts]

    seen = []
    while cache.pools.drop_cached(1):
        seen.append(found())
    assert seen == [[3, 2, 3], [3, 1, 3], [3, 0, 3], [3, 0, 2], [3, 0, 1], [3, 0, 0], [2, 0, 0], [1, 0, 0], [0, 0, 0]]


def test_no_salt_has_the_key_of_a_block_for_its_root() -> None:
    """A client chooses its name, and could choose one that says what a block's hash says."""
    cache, tokens = PrefixCache(2), (1, 2)
    name = "twelve bytes" + np.asarray(tokens, np.int32).tobytes().decode()
    assert cache.root(name).key != chain_hash(b"salttwelve bytes", tokens)
