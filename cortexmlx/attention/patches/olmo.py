"""mlx-lm's OLMo adds the name of a mask to its scores and cannot compute a prompt. Here it calls paged attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from cortexmlx.attention.mlx_lm_hook import LayerCache, attend


def block(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Replaces `TransformerBlock.__call__`."""

    def call(self: Any, x: mx.array, mask: mx.array | None = None, cache: Any = None) -> mx.array:
        if not isinstance(cache, LayerCache):
            return original(self, x, mask, cache)
        tokens = x.shape[0]
        parts = mx.split(self.att_proj(self.att_norm(x)), 3, axis=-1)
        queries, keys, values = (part.reshape(tokens, self.n_heads, 1, -1) for part in parts)
        queries, keys = (self.rope(heads, offset=cache.offset) for heads in (queries, keys))
        handle, _ = cache.update_and_fetch(keys, values)
        out = attend(queries, handle, scale=self.scale)
        hidden = x + self.attn_out(out.reshape(tokens, 1, -1))
        up, gate = mx.split(self.ff_proj(self.ff_norm(hidden)), 2, axis=-1)
        added: mx.array = hidden + self.ff_out(nn.silu(gate) * up)
        return added

    return call
