"""GPTBigCode has one position for the whole batch. In a step, each row has its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from cortexmlx.attention.mlx_lm_hook import LayerCache


def body(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Replaces `GPTBigCodeModel.__call__`."""

    def call(self: Any, inputs: mx.array, cache: Any = None) -> mx.array:
        if not cache or not isinstance(cache[0], LayerCache):
            return original(self, inputs, cache)
        hidden: mx.array = self.wte(inputs) + self.wpe(cache[0].offset)[:, None]
        for layer, layer_cache in zip(self.h, cache, strict=True):
            hidden = layer(hidden, None, cache=layer_cache)
        normed: mx.array = self.ln_f(hidden)
        return normed

    return call
