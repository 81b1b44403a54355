"""What the pools of all groups share."""

from __future__ import annotations

from cortexmlx.kv.pools import BlockPools
from cortexmlx.kv.prefix import PrefixCache
from cortexmlx.kv.spec import KVSpec, LayerGroup


def test_an_empty_prefix_cache_is_taken_as_it_is() -> None:
    """It has a length, so it is false; its identity is that of the model."""
    prefix = PrefixCache(8)
    assert BlockPools([LayerGroup(KVSpec(1, 4, 4, "float32"), (0,))], 4, 8, prefix=prefix).prefix is prefix
