"""PLaMo repeats its key heads all in a row before it attends: query head h uses key head `h % key heads`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from cortexmlx.attention.mlx_lm_hook import LayerCache, attend


def attention(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Replaces `Attention.__call__`: the query heads of a key head are brought together instead."""

    def call(self: Any, hidden_states: mx.array, attention_mask: mx.array | None = None, cache: Any = None) -> mx.array:
        if not isinstance(cache, LayerCache):
            return original(self, hidden_states, attention_mask, cache)
        tokens, shared, heads = hidden_states.shape[0], self.config.n_shared_head, self.k_num_heads
        queries = self.q_proj(hidden_states).reshape(tokens, shared * heads, 1, self.qk_dim)
        keys = self.k_proj(hidden_states).reshape(tokens, heads, 1, self.qk_dim)
        values = self.v_proj(hidden_states).reshape(tokens, heads, 1, self.v_dim)
        queries, keys = (self.rotary_emb(each, offset=cache.offset) for each in (queries, keys))
        handle, _ = cache.update_and_fetch(keys, values)
        together = queries.reshape(tokens, shared, heads, -1).swapaxes(1, 2).reshape(queries.shape)
        out = attend(together, handle, scale=self.scale)
        projected: mx.array = self.o_proj(out.reshape(tokens, heads, shared, -1).swapaxes(1, 2).reshape(tokens, 1, -1))
        return projected

    return call
