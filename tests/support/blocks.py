"""Looking at a sequence's blocks."""

from __future__ import annotations

from cortexmlx.kv.cache import KVCache


def capacity(cache: KVCache, seq: int) -> int:
    """Tokens for which the sequence has blocks."""
    return min(len(cache.block_table(seq, group)) for group in range(len(cache.groups))) * cache.block_size
