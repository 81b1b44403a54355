"""Llama 4 masks its chunks itself, from what mlx-lm's chunked cache still has. Where it does not rotate its queries, it
scales them by their position, with one number for the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from cortexmlx.attention.mlx_lm_hook import LayerCache, attend


def body(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Replaces `LlamaModel.__call__`, without masks: the handles know which tokens a query sees."""

    def call(self: Any, inputs: mx.array, cache: Any = None) -> mx.array:
        if not cache or not isinstance(cache[0], LayerCache):
            return original(self, inputs, cache)
        hidden: mx.array = self.embed_tokens(inputs)
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            hidden = layer(hidden, None, cache=layer_cache)
        normed: mx.array = self.norm(hidden)
        return normed

    return call


def attention(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Replaces `Attention.__call__`: a layer without rotation scales each token's query by its own position."""

    def call(self: Any, x: mx.array, mask: mx.array | None = None, cache: Any = None) -> mx.array:
        if not isinstance(cache, LayerCache) or self.use_rope or not self.attn_temperature_tuning:
            return original(self, x, mask, cache)
        tokens, dim = x.shape[0], self.head_dim
        queries = self.q_proj(x).reshape(tokens, self.n_heads, 1, dim)
        keys = self.k_proj(x).reshape(tokens, self.n_kv_heads, 1, dim)
        values = self.v_proj(x).reshape(tokens, self.n_kv_heads, 1, dim)
        scales = mx.log(mx.floor((cache.offset + 1) / self.floor_scale) + 1.0) * self.attn_scale + 1.0
        queries = (queries * scales[:, None, None, None]).astype(queries.dtype)
        handle, _ = cache.update_and_fetch(keys, values)
        out = attend(queries, handle, scale=self.scale)
        projected: mx.array = self.o_proj(out.reshape(tokens, 1, -1))
        return projected

    return call
