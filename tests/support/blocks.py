"""Looking at a sequence's blocks."""

from __future__ import annotations

from cortexmlx.kv.cache import KVCache


def capacity(cache: KVCache, seq: int) -> int:
    """Tokens for which the sequence has blocks."""
    return min(len(cache.block_table(seq, group)) for group in range(len(cache.groups))) * cache.block_size


def cached_text(cache: KVCache, tokens: list[int], seq: int = 0) -> None:
    """A sequence that has come and gone, and left its tokens in the prefix cache."""
    keys = cache.prefix.keys(tokens)
    cache.allocate_for(seq, len(tokens))
    cache.append(seq, len(tokens))
    cache.register(seq, tokens, len(tokens), keys)
    cache.release_blocks(seq, tokens, len(tokens), keys)
