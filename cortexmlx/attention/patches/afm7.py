"""AFM 7's last layers have only queries, which attend to the keys and values of the layer before them. The original
takes their position from the length of those.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from cortexmlx.attention.mlx_lm_hook import LayerCache, attend


def body(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Replaces `AFMModel.__call__`: the position is that of each token."""

    def call(self: Any, inputs: mx.array, cache: Any = None) -> mx.array:
        if not cache or not isinstance(cache[-1], LayerCache):
            return original(self, inputs, cache)
        hidden: mx.array = self.embedding(inputs)
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            hidden = layer(hidden, None, cache=layer_cache)
        for layer in self.kv_reuse_layers:
            hidden = hidden + _reuse(layer.self_attn, layer.input_layernorm(hidden), cache[-1])
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        normed: mx.array = self.output_norm(hidden)
        return normed

    return call


def _reuse(own: Any, x: mx.array, cache: LayerCache) -> mx.array:
    """`KVReuseAttention` over the keys and values in `cache`."""
    queries = own.q_proj(x).reshape(x.shape[0], own.n_heads, 1, own.head_dim)
    queries = own.q_norm(own.rope(queries, offset=cache.offset))
    handle, _ = cache.keys_and_values()
    out = attend(queries, handle, scale=own.scale)
    projected: mx.array = own.out_proj(out.reshape(x.shape[0], 1, -1))
    return projected
