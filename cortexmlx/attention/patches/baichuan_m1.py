"""Baichuan M1 mixes each key and value with the one before it, and keeps the last ones as a state beside its cache. Its
attention needs a whole step, so only the mixing is done by rows (`StateLeaf.shifted`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from cortexmlx.attention.mlx_lm_hook import LayerCache, attend


def attention(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Replaces `Attention.__call__`."""

    def call(self: Any, x: mx.array, mask: mx.array | None = None, cache: Any = None) -> mx.array:
        if cache is None or not isinstance(cache[1], LayerCache):
            return original(self, x, mask, cache)
        state, paged = cache
        tokens, dim = x.shape[0], self.head_dim
        ends = (self.hidden_size, self.hidden_size + self.num_kv_heads * dim)
        queries, *new = (part.reshape(tokens, -1, 1, dim) for part in mx.split(self.W_pack(x), ends, -1))
        keys, values = (
            state.shifted(slot, each) * weights[0, 0, :, :, :1] + each * weights[0, 0, :, :, 1:]
            for slot, (each, weights) in enumerate(zip(new, (self.conv_k, self.conv_v), strict=True))
        )
        queries, keys = (self.rope(heads, offset=paged.offset) for heads in (queries, keys))
        handle, _ = paged.update_and_fetch(keys, values)
        out = attend(queries, handle, scale=self.scale)
        projected: mx.array = self.o_proj(out.reshape(tokens, 1, -1))
        return projected

    return call
