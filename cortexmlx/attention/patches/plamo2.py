"""PLaMo 2 calls MLX's attention directly, not mlx-lm's function for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from cortexmlx.attention.mlx_lm_hook import LayerCache, attend


def attention(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Replaces `Attention.__call__`."""

    def call(self: Any, hidden_states: mx.array, mask: mx.array | None = None, cache: Any = None) -> mx.array:
        if not isinstance(cache, LayerCache):
            return original(self, hidden_states, mask, cache)
        tokens = hidden_states.shape[0]
        ends = (self.q_proj_dim, self.q_proj_dim + self.k_proj_dim)
        heads = [part.reshape(tokens, -1, 1, self.qk_dim) for part in mx.split(self.qkv_proj(hidden_states), ends, -1)]
        weights = (self.q_weight, self.k_weight)
        queries, keys = (
            self.rope(mx.fast.rms_norm(part, None, 1e-6) * weight[:, None], offset=cache.offset)
            for part, weight in zip(heads[:2], weights, strict=True)
        )
        handle, _ = cache.update_and_fetch(keys, heads[2])
        out = attend(queries, handle, scale=self.scale)
        projected: mx.array = self.o_proj(out.reshape(tokens, 1, -1))
        return projected

    return call
