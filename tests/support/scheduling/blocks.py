"""Looking at a sequence's blocks, and at the picture of all blocks."""

from __future__ import annotations

from collections import Counter

from cortexmlx.kv.cache import KVCache
from cortexmlx.stats import BlockState


def capacity(cache: KVCache, seq: int) -> int:
    """Tokens for which the sequence has blocks."""
    return min(len(cache.tables.block_table(seq, group)) for group in range(len(cache.groups))) * cache.block_size


def cached_text(cache: KVCache, tokens: list[int], seq: int = 0) -> None:
    """A sequence that has come and gone, and left its tokens in the prefix cache."""
    keys = cache.prefix.keys(tokens)
    cache.allocate_for(seq, len(tokens))
    cache.append(seq, len(tokens))
    cache.register(seq, tokens, len(tokens), keys)
    cache.cache_and_free(seq, tokens, len(tokens), keys)


def check_block_map(cache: KVCache) -> None:
    """The picture says of every block what the allocator, the block tables and the counts say of it."""
    picture, stats = cache.pools.block_map(), cache.stats()
    assert [len(group.states) for group in picture.groups] == [*cache.pools.blocks]
    assert [group.limit for group in picture.groups] == [*cache.pools.max_blocks]
    for number, group in enumerate(picture.groups):
        owners = Counter(b for seq in cache.tables.sequences for b in cache.tables.block_table(seq, number).tolist())
        on_disk = {e.blocks[number] for e in cache.prefix.entries if number in e.on_disk}
        for block, (state, mark) in enumerate(
            zip(group.states, cache.pools[number].allocator.block_map(), strict=True)
        ):
            kept = BlockState.STORED if block in on_disk else BlockState.CACHED
            owned = {0: kept if mark == "X" else BlockState.FREE, 1: BlockState.PRIVATE}
            assert state == owned.get(owners[block], BlockState.SHARED), f"block {block} of group {number}"
        assert sum(map(group.count, BlockState)) == len(group.states)
    count = picture.count
    assert count(BlockState.PRIVATE) + count(BlockState.SHARED) == stats.used_blocks
    assert (count(BlockState.SHARED), picture.total) == (stats.shared_blocks, stats.total_blocks)
    assert count(BlockState.CACHED) + count(BlockState.STORED) == stats.cached_blocks
    assert picture.total - stats.used_blocks == stats.free_blocks
    assert count(BlockState.FREE) == sum(cache.pools[g].allocator.free_blocks for g in range(len(cache.groups)))
