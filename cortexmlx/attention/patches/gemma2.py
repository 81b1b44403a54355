"""Gemma 2 computes soft-capped scores itself. Paged attention has the soft cap, so the layer calls that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from cortexmlx.attention.mlx_lm_hook import LayerCache, attend


def attention(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Replaces `Attention.__call__`."""

    def call(self: Any, x: mx.array, mask: mx.array | None = None, cache: Any = None) -> mx.array:
        if not isinstance(cache, LayerCache):
            return original(self, x, mask, cache)
        tokens, dim = x.shape[0], self.head_dim
        queries = self.q_proj(x).reshape(tokens, self.n_heads, 1, dim)
        keys = self.k_proj(x).reshape(tokens, self.n_kv_heads, 1, dim)
        values = self.v_proj(x).reshape(tokens, self.n_kv_heads, 1, dim)
        queries, keys = (self.rope(heads, offset=cache.offset) for heads in (queries, keys))
        handle, _ = cache.update_and_fetch(keys, values)
        out = attend(queries, handle, scale=self.scale, softcap=self.attn_logit_softcapping)
        projected: mx.array = self.o_proj(out.reshape(tokens, 1, -1))
        return projected

    return call
