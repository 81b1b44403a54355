"""LayerAttention: what a layer asks of attention, as far as a choice depends on it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from cortexmlx.attention.mlx_lm_hook import LayerCache, arranged, own_caches
from cortexmlx.attention.paged import AttentionCall, PagedKV
from cortexmlx.attention.state.probe import NotedState, is_state
from cortexmlx.kv.arena import KVArena
from cortexmlx.kv.spec import KVSpec
from cortexmlx.kv.step import GroupStep
from cortexmlx.types.arrays import dtype_name

LayerKey = tuple[Any, ...]
"""Names a `LayerAttention` among those of an engine. It is made for each layer of each step, so it is a plain tuple."""


def layer_key(
    queries: mx.array, kv: PagedKV, sinks: mx.array | None, softcap: float | None, slopes: mx.array | None
) -> LayerKey:
    """Return the key of a layer that asks for the attention of `queries`."""
    slab = kv.arena.slab(kv.layer)
    return (
        queries.dtype,
        slab[-1].dtype,
        queries.shape[1],
        slab[0].shape[0],
        queries.shape[3],
        kv.arena.spec(kv.layer).value_dim,
        softcap,
        None if sinks is None else sinks.dtype,
        slopes is not None,
        kv.quantization,
    )


@dataclass(frozen=True)
class LayerAttention:
    """The shape of a layer's attention."""

    dtype: str
    """Of queries and results."""
    query_heads: int
    spec: KVSpec
    """What the layer keeps. It has no window here: a window only decides how many tokens are seen."""
    block_size: int
    scale: float
    softcap: float | None
    sinks: str | None
    """The dtype of the sinks, if there are any."""
    slopes: bool
    window: int | None
    """The most tokens that a query sees; None: all."""

    @property
    def call(self) -> AttentionCall:
        """Its call of `paged_attention`."""
        asked = self.softcap is not None, self.sinks is not None, self.slopes
        return AttentionCall(self.dtype, self.query_heads, self.spec.key_dim, *asked)

    @property
    def coarse(self) -> bool:
        """Whether its products are rounded coarsely here: see `reference.rounds_coarsely`."""
        return bool(mx.default_device() == mx.cpu) and not self.dtype == self.spec.dtype == "float32"

    @property
    def label(self) -> str:
        """The shape in a line of a table."""
        spec = self.spec
        dims = str(spec.key_dim) if spec.key_dim == spec.value_dim else f"{spec.key_dim}/{spec.value_dim}"
        dtype = self.dtype if self.dtype == spec.dtype else f"{self.dtype} on {spec.dtype}"
        more = {
            f"{spec.kv_bits}-bit KV in groups of {spec.kv_group_size}": spec.kv_bits is not None,
            "latent": spec.value_in_key,
            "softcap": self.softcap is not None,
            "sinks" if self.sinks == self.dtype else f"{self.sinks} sinks": self.sinks is not None,
            "alibi": self.slopes,
        }
        heads = f"{self.query_heads} heads on {spec.kv_heads}, head_dim {dims}, blocks of {self.block_size}"
        return ", ".join([f"attention {dtype}", heads, *(name for name, has in more.items() if has)])


def layers_of(model: nn.Module, arena: KVArena) -> dict[LayerKey, LayerAttention]:
    """Return what the layers of a model ask of attention, from one lazy forward pass that is never evaluated. Layers
    that ask for the same are one entry, with the largest of their windows.

    The model must have been probed. The arena needs no blocks.
    """
    found: dict[LayerKey, LayerAttention] = {}
    step = _step_of(rows=2)

    def attend(
        queries: mx.array,
        kv: PagedKV,
        *,
        scale: float,
        sinks: mx.array | None = None,
        softcap: float | None = None,
        slopes: mx.array | None = None,
    ) -> mx.array:
        spec = arena.spec(kv.layer)
        layer = LayerAttention(
            dtype_name(queries.dtype),
            queries.shape[1],
            replace(spec, window=None, chunked=False),
            arena.block_size,
            scale,
            softcap,
            None if sinks is None else dtype_name(sinks.dtype),
            slopes is not None,
            spec.window,
        )
        key = layer_key(queries, kv, sinks, softcap, slopes)
        known = found.setdefault(key, layer)
        if known.window is not None and (layer.window is None or layer.window > known.window):
            found[key] = layer
        return mx.zeros((*queries.shape[:-1], spec.value_dim), queries.dtype)

    def fetch(layer: int, keys: mx.array, values: mx.array | None) -> PagedKV:
        return PagedKV(arena, layer, step, None, 0, keys.dtype, attend, quantization=arena.quantization(layer))

    leaves: list[Any] = [
        NotedState(len(cache.cache), lambda: None) if is_state(cache) else LayerCache(leaf, fetch)
        for leaf, cache in enumerate(own_caches(model))
    ]
    for leaf in leaves:
        if isinstance(leaf, LayerCache):
            leaf.begin(mx.zeros(step.rows, mx.int32))
    model(mx.zeros((step.rows, 1), mx.int32), cache=arranged(model, leaves))
    return found


def _step_of(rows: int) -> GroupStep:
    """Return a step of rows without tokens, whose shapes are a step's."""
    spec = KVSpec(0, 0, 0, "float32")
    return GroupStep(np.zeros((rows, 1), np.int32), np.zeros(rows, np.int32), (None,) * rows, (), spec.attention_window)
