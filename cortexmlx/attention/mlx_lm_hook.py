"""Hooks paged attention into mlx-lm's models, which are used unchanged: caches, handles, and
`scaled_dot_product_attention`.

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


def flatten_caches(caches: Sequence[Any]) -> list[Any]:
    """Return the caches of all layers as a flat list of *leaves*; a layer with several caches has several leaves."""
    return [leaf for cache in caches for leaf in (cache.caches if _is_cache_list(cache) else (cache,))]


def make_mlx_lm_caches(model: nn.Module) -> list[Any]:
    """Return the caches (leaves) that mlx-lm itself makes for a model."""
    return flatten_caches(make_prompt_cache(model))


def group_by_layer(model: nn.Module, leaves: Sequence[_Leaf]) -> list[_Leaf | tuple[_Leaf, ...]]:
    """Return each layer's leaf or tuple of leaves. On a pipeline rank that must send its results, set their `sends`."""
    if _is_sending_rank(model):
        for leaf in leaves:
            if isinstance(leaf, PipelineSender):
                leaf.sends = True
    rest = iter(leaves)
    return [
        tuple(next(rest) for _ in cache.caches) if _is_cache_list(cache) else next(rest)
        for cache in make_prompt_cache(model)
    ]


def _is_sending_rank(model: nn.Module) -> bool:
    """Return whether a model, or a module in it (not in a list), is a pipeline rank above 0, which has to send."""
    parts = (part for part in model.values() if isinstance(part, nn.Module))
    return bool(getattr(model, "pipeline_rank", 0)) or any(map(_is_sending_rank, parts))


def _is_cache_list(cache: Any) -> bool:
    """Return whether a layer has several caches."""
    return isinstance(cache, CacheList)


class PipelineSender:
    """Base of our caches: holds what a pipeline rank must evaluate to send its results to the next rank.

    mlx-lm's pipelines let the keys of their last cache depend on what they sent: whoever evaluates the keys sends it.
    Our caches have no keys, but a place for that, and whoever runs a step evaluates it. Otherwise a step that needs no
    logits would never send, and the next rank would wait for ever.
    """

    sends = False
    pending_send: mx.array | None = None
    """It can be evaluated when the step's results have been sent; None in all other caches, and between steps."""

    @property
    def keys(self) -> mx.array:
        """A stand-in for a cache's keys. mlx-lm's pipeline replaces it by an array that depends on the sending."""
        if not self.sends:
            raise AttributeError("keys")
        return mx.zeros((1,), mx.int32)

    @keys.setter
    def keys(self, value: mx.array) -> None:
        if not self.sends:
            raise AttributeError("keys")
        self.pending_send = value


def take_pending_sends(leaves: Sequence[PipelineSender]) -> list[mx.array]:
    """Return, and forget, the arrays that must be evaluated so that a step's results are sent."""
    pending = [leaf.pending_send for leaf in leaves if leaf.pending_send is not None]
    for leaf in leaves:
        leaf.pending_send = None
    return pending


class LayerCache(PipelineSender):
    """A layer's cache (a leaf) as an mlx-lm model sees it. `fetch(layer, keys, values)` stores a step's keys and values
    and returns the handle to attend with. Without `values`, the values are part of the keys.
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
        """Return None: the handle knows which tokens a query sees."""
        return None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Store the step's keys and values `[tokens, kv_heads, 1, dim]`. Return the handle in the place of both."""
        self._handle = self._fetch(self._layer, keys, values)
        return self._handle, self._handle

    def keys_and_values(self) -> tuple[Any, Any]:
        """Return the step's handle, twice again, for a layer without keys of its own that attends to this cache."""
        return self._handle, self._handle

    def update_and_fetch_keys(self, keys: mx.array) -> Any:
        """Store keys `[tokens, kv_heads, 1, dim]` that contain the values. Return the handle."""
        return self._fetch(self._layer, keys, None)


class UnhookedAttention(Exception):
    """Raised when a model computes with keys and values itself, not through the hooked attention."""


class ProbeKV:
    """The handle in a probe's forward pass: it records shapes and attention calls, and calls `note(call)` for each.
    Without `values`, the values are part of the keys, and the attending layer sets the size of a value.
    """

    def __init__(
        self, keys: mx.array, values: mx.array | None, note: Callable[[AttentionCall], None] = lambda call: None
    ) -> None:
        self.keys, self.dtype = keys, keys.dtype
        self.value_in_key = values is None
        self.value_dim = 0 if values is None else values.shape[-1]
        self.was_attended = False
        self.note = note

    def astype(self, _: mx.Dtype) -> ProbeKV:
        """Return the handle unchanged."""
        return self

    def __getattr__(self, _: str) -> Any:
        raise UnhookedAttention


class CustomHandle(ABC):
    """A layer handle with its own attention method, such as latent attention."""

    @abstractmethod
    def attend(self, queries: mx.array, scale: float, score_term: mx.array | None) -> mx.array:
        """Return the attention of the model's queries, with its `scale`; `score_term` is added to the scores."""


_params_with_scale = lru_cache(AttentionParams)
"""The value of a layer that has a scale only, as nearly all have. Each of their calls would make one otherwise."""


def install_attention_hook() -> None:
    """Put the paged `scaled_dot_product_attention` into every mlx-lm model module loaded so far. Safe to call again."""
    replace_function("base", "scaled_dot_product_attention", _dispatch_attention)


def _dispatch_attention(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Return a function that attends through our handles, and calls `original` for any other keys."""

    def attend_or_call_original(
        queries: mx.array,
        keys: Any,
        values: Any,
        cache: Any = None,
        scale: float = 1.0,
        mask: mx.array | None = None,
        sinks: mx.array | None = None,
        **kwargs: Any,
    ) -> mx.array:
        if type(keys) is PagedKV and mask is None and not kwargs:  # almost always; `paged_attention` without slopes
            return keys.attend(
                queries, keys, _params_with_scale(scale) if sinks is None else AttentionParams(scale, sinks)
            )
        if isinstance(keys, CustomHandle) and values is keys and sinks is None and not kwargs:
            return keys.attend(queries, scale, mask)
        if isinstance(keys, PagedKV | ProbeKV | CustomHandle):
            if mask is not None or kwargs or isinstance(keys, CustomHandle):
                raise ModelUnsupported(
                    "the model adds its own term to attention scores, which paged attention does not do"
                )
            return attend(queries, keys, AttentionParams(scale, sinks))
        return original(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks, **kwargs)

    return attend_or_call_original


def attend(queries: mx.array, handle: PagedKV | ProbeKV, params: AttentionParams) -> mx.array:
    """Return the attention of queries `[tokens, query_heads, 1, head_dim]` over the keys and values of a handle."""
    if isinstance(handle, PagedKV):
        return paged_attention(queries, handle, params)
    handle.was_attended = True
    handle.note(AttentionCall.from_arguments(queries, params))
    return mx.zeros((*queries.shape[:-1], handle.value_dim), queries.dtype)
