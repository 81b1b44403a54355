"""The seam into mlx-lm's models, which are used as they are.

A model asks its cache for `offset` and a mask, hands new keys and values to `update_and_fetch`, and calls its module's
`scaled_dot_product_attention`. Our cache objects return `PagedKV` handles, and the module-level function is replaced
by one that recognises a handle and calls `paged_attention`, and calls the original for everything else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache as PlainCache
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

from cortexmlx.attention.paged import PagedKV, paged_attention
from cortexmlx.errors import ModelUnsupported
from cortexmlx.host.modules import replace_function
from cortexmlx.kv.spec import KVSpec


class LayerCache:
    """One layer's cache as an mlx-lm model sees it. `fetch(layer, keys, values)` writes a step's tokens and returns
    the handle.
    """

    def __init__(self, layer: int, fetch: Callable[[int, mx.array, mx.array], Any]) -> None:
        self._layer = layer
        self._fetch = fetch
        self.offset: mx.array | int = 0

    def make_mask(self, *_: Any, **__: Any) -> None:
        """No mask: which tokens a query sees is part of the handle."""
        return None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Take `[tokens, kv_heads, 1, dim]` keys and values of the step; return the handle in the place of both."""
        handle = self._fetch(self._layer, keys, values)
        return handle, handle


class _ProbeCache(LayerCache):
    """A cache of a probe, at position 0 of every row: records the window that the model's mask would show."""

    def __init__(self, layer: int, rows: int, fetch: Callable[[int, mx.array, mx.array], _ProbeKV]) -> None:
        super().__init__(layer, fetch)
        self.offset = mx.zeros(rows, mx.int32)
        self.mask_window: int | None = None

    def make_mask(self, *_: Any, window_size: int | None = None, **__: Any) -> None:
        self.mask_window = window_size or self.mask_window


class _OwnAttention(Exception):
    """A model computes with keys and values itself."""


class _ProbeKV:
    """The handle of a probe: records the shapes, and that attention was reached through the seam."""

    def __init__(self, keys: mx.array, values: mx.array) -> None:
        self.keys, self.values, self.dtype = keys, values, keys.dtype
        self.attended = False

    def astype(self, _: mx.Dtype) -> _ProbeKV:
        return self

    def __getattr__(self, _: str) -> Any:
        raise _OwnAttention


_log = logging.getLogger(__name__)


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
        if isinstance(keys, PagedKV):
            if mask is not None or others:
                raise ModelUnsupported(
                    "the model adds its own term to attention scores, which paged attention does not do"
                )
            return paged_attention(queries, keys, scale=scale, sinks=sinks)
        if isinstance(keys, _ProbeKV):
            keys.attended = mask is None and not others
            return mx.zeros((*queries.shape[:-1], keys.values.shape[-1]), queries.dtype)
        return original(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks, **others)

    return attention


def probe(model: nn.Module) -> list[KVSpec]:
    """Install the seam and find out what each layer caches, from one lazy forward pass that is never evaluated.

    Raises ModelUnsupported when a layer keeps something else than keys and values, or attends past the seam.
    """
    install()
    windows = [_window(model, cache) for cache in make_prompt_cache(model)]
    seen: dict[int, _ProbeKV] = {}

    def fetch(layer: int, keys: mx.array, values: mx.array) -> _ProbeKV:
        seen[layer] = _ProbeKV(keys, values)
        return seen[layer]

    caches = [_ProbeCache(layer, 2, fetch) for layer in range(len(windows))]
    try:
        model(mx.zeros((2, 1), mx.int32), cache=caches)
    except Exception as error:  # whatever a model's code raises when it is called in a way that it was not written for
        _log.info("%s fails in a step of two rows", _kind(model), exc_info=True)
        own = isinstance(error, _OwnAttention) or _ProbeKV.__name__ in str(error)
        why = (
            "its layers compute attention themselves, not by mlx-lm's function"
            if own
            else "mlx-lm's code for it cannot compute a step of several rows at different positions"
        )
        raise ModelUnsupported(f"{_kind(model)}: {why}, so its attention cannot be paged") from error
    bypassed = [layer for layer in range(len(windows)) if layer not in seen or not seen[layer].attended]
    if bypassed:
        raise ModelUnsupported(f"{_kind(model)}: layers {bypassed} attend in a way that cannot be paged")
    for cache, window in zip(caches, windows, strict=True):
        if cache.mask_window not in (None, window):
            kept = "all of them" if window is None else f"only {window}"
            raise ModelUnsupported(
                f"{_kind(model)}: a token of a prompt is to see {cache.mask_window} tokens, but {kept} are kept for an "
                "answer's: which of the two is meant is not known"
            )
    return [
        KVSpec(
            kv_heads=seen[layer].keys.shape[1],
            key_dim=seen[layer].keys.shape[-1],
            value_dim=seen[layer].values.shape[-1],
            dtype=str(seen[layer].keys.dtype).removeprefix("mlx.core."),
            window=window,
        )
        for layer, window in enumerate(windows)
    ]


def lazy_pass(model: nn.Module, tokens: mx.array, attended: Callable[[], None]) -> mx.array:
    """Logits of flat tokens `[T, 1]`, all at position 0, which must not be evaluated. `attended` is called as each
    layer hands over its keys and values. The model has been probed.
    """

    def fetch(_: int, keys: mx.array, values: mx.array) -> _ProbeKV:
        attended()
        return _ProbeKV(keys, values)

    caches = [_ProbeCache(layer, tokens.shape[0], fetch) for layer in range(len(make_prompt_cache(model)))]
    logits: mx.array = model(tokens, cache=caches)
    return logits


def _window(model: nn.Module, cache: Any) -> int | None:
    """The sliding window that one of mlx-lm's own caches stands for."""
    if type(cache) is PlainCache:
        return None
    if type(cache) is RotatingKVCache:
        return int(cache.max_size)
    raise ModelUnsupported(f"{_kind(model)} keeps a {type(cache).__name__} in some layers, which cannot be paged yet")


def _kind(model: nn.Module) -> str:
    return str(getattr(model, "model_type", type(model).__module__.rpartition(".")[2]))
