"""The place where mlx-lm's models meet paged attention. The models are used unchanged.

A model asks its cache for `offset` and a mask, gives new keys and values to `update_and_fetch`, and calls its module's
`scaled_dot_product_attention`. Our cache objects return `PagedKV` handles. The module's function is replaced by one
that calls the backend for a handle, and the original function for everything else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import CacheList, make_prompt_cache

from cortexmlx.attention.paged import AttentionCall, AttentionParams, PagedKV, paged_attention
from cortexmlx.errors import ModelUnsupported
from cortexmlx.mlx_lm.modules import replace_function

_Leaf = TypeVar("_Leaf")


def leaves_of(caches: Sequence[Any]) -> list[Any]:
    """Return mlx-lm's caches of a model's layers. If a layer has several caches, each is one *leaf*."""
    return [leaf for cache in caches for leaf in (cache.caches if _several(cache) else (cache,))]


def own_caches(model: nn.Module) -> list[Any]:
    """Return the leaves of the caches that mlx-lm makes for a model."""
    return leaves_of(make_prompt_cache(model))


def arranged(model: nn.Module, leaves: Sequence[_Leaf]) -> list[_Leaf | tuple[_Leaf, ...]]:
    """Return a cache for each of the model's layers, given one for each leaf: a tuple if the layer has several. In a
    pipeline's part that sends, each is a `Sender` that has the place.
    """
    if _sends(model):
        for leaf in leaves:
            if isinstance(leaf, Sender):
                leaf.sends = True
    rest = iter(leaves)
    return [
        tuple(next(rest) for _ in cache.caches) if _several(cache) else next(rest) for cache in make_prompt_cache(model)
    ]


def _sends(model: nn.Module) -> bool:
    """Return whether a model is a pipeline's part that sends. What has the layers lies outside of all lists, so few
    modules are looked at.
    """
    parts = (part for part in model.values() if isinstance(part, nn.Module))
    return bool(getattr(model, "pipeline_rank", 0)) or any(map(_sends, parts))


def _several(cache: Any) -> bool:
    return isinstance(cache, CacheList)


class Sender:
    """What a cache has besides in a part of a pipeline that sends its results to the next rank (`arranged`).

    mlx-lm's pipelines let the keys of their last cache depend on what they sent: whoever evaluates the keys sends it.
    Our caches have no keys, but a place for that, and whoever runs a step evaluates it. Otherwise a step that needs no
    logits would never send, and the next rank would wait for ever.
    """

    sends = False
    sent: mx.array | None = None
    """It can be evaluated when the step's results have been sent; None in all other caches, and between steps."""

    @property
    def keys(self) -> mx.array:
        """What the model makes depend on the sending."""
        if not self.sends:
            raise AttributeError("keys")
        return mx.zeros((1,), mx.int32)

    @keys.setter
    def keys(self, after: mx.array) -> None:
        if not self.sends:
            raise AttributeError("keys")
        self.sent = after


def take_sent(leaves: Sequence[Sender]) -> list[mx.array]:
    """Return what must be evaluated so that a step's results are sent, once."""
    sent = [leaf.sent for leaf in leaves if leaf.sent is not None]
    for leaf in leaves:
        leaf.sent = None
    return sent


class LayerCache(Sender):
    """The cache of one leaf as an mlx-lm model sees it. `fetch(layer, keys, values)` stores a step's tokens and returns
    the handle. Without values, they are part of the keys.
    """

    def __init__(self, layer: int, fetch: Callable[[int, mx.array, mx.array | None], Any]) -> None:
        self._layer = layer
        self._fetch = fetch
        self._handle: Any = None
        self.offset: mx.array | int = 0

    def begin(self, offset: mx.array | int) -> None:
        """Begin a step whose tokens are at the positions `offset` `[tokens]`."""
        self.offset, self._handle = offset, None

    def make_mask(self, *_: Any, **__: Any) -> None:
        """Return no mask: the handle knows which tokens a query sees."""
        return None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Take the step's keys and values `[tokens, kv_heads, 1, dim]`. Return the handle instead of both."""
        self._handle = self._fetch(self._layer, keys, values)
        return self._handle, self._handle

    def keys_and_values(self) -> tuple[Any, Any]:
        """Return the handle again, for a layer that has no keys and values of its own and attends to these."""
        return self._handle, self._handle

    def fetch_keys(self, keys: mx.array) -> Any:
        """Take keys `[tokens, kv_heads, 1, dim]` that contain the values. Return the handle."""
        return self._fetch(self._layer, keys, None)


class OwnAttention(Exception):
    """Raised when a model computes with keys and values itself."""


class ProbeKV:
    """The handle of a probe. It records the shapes, and that attention was called, and calls `note(call)` each time.
    Without values, they are part of the keys, and whoever attends sets how many numbers they have.
    """

    def __init__(
        self, keys: mx.array, values: mx.array | None, note: Callable[[AttentionCall], None] = lambda call: None
    ) -> None:
        self.keys, self.dtype = keys, keys.dtype
        self.value_in_key = values is None
        self.value_dim = 0 if values is None else values.shape[-1]
        self.attended = False
        self.note = note

    def astype(self, _: mx.Dtype) -> ProbeKV:
        return self

    def __getattr__(self, _: str) -> Any:
        raise OwnAttention


class OwnHandle(ABC):
    """The handle of a layer that attends in a way of its own."""

    @abstractmethod
    def attend(self, queries: mx.array, scale: float, added: mx.array | None) -> mx.array:
        """Return the attention of the model's queries, with its scale, and with what it adds to the scores."""


_scaled = lru_cache(AttentionParams)
"""The value of a layer that has a scale only, as nearly all have. Each of their calls would make one otherwise."""


def install() -> None:
    """Replace `scaled_dot_product_attention` in every mlx-lm model module loaded so far. Safe to call again."""
    replace_function("base", "scaled_dot_product_attention", _dispatching)


def _dispatching(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def attention(
        queries: mx.array,
        keys: Any,
        values: Any,
        cache: Any = None,
        scale: float = 1.0,
        mask: mx.array | None = None,
        sinks: mx.array | None = None,
        **others: Any,
    ) -> mx.array:
        if type(keys) is PagedKV and mask is None and not others:  # almost always; `paged_attention` without slopes
            return keys.attend(queries, keys, _scaled(scale) if sinks is None else AttentionParams(scale, sinks))
        if isinstance(keys, OwnHandle) and values is keys and sinks is None and not others:
            return keys.attend(queries, scale, mask)
        if isinstance(keys, PagedKV | ProbeKV | OwnHandle):
            if mask is not None or others or isinstance(keys, OwnHandle):
                raise ModelUnsupported(
                    "the model adds its own term to attention scores, which paged attention does not do"
                )
            return attend(queries, keys, AttentionParams(scale, sinks))
        return original(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks, **others)

    return attention


def attend(queries: mx.array, handle: PagedKV | ProbeKV, params: AttentionParams) -> mx.array:
    """Return the attention of a layer's queries `[tokens, query_heads, 1, head_dim]` over the keys and values of a
    handle.
    """
    if isinstance(handle, PagedKV):
        return paged_attention(queries, handle, params)
    handle.attended = True
    handle.note(AttentionCall.of(queries, params))
    return mx.zeros((*queries.shape[:-1], handle.value_dim), queries.dtype)
