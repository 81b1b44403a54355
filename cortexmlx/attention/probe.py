"""Probes a model with forward passes that are never evaluated, to find what each layer caches and how it attends."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ChunkedKVCache, RotatingKVCache
from mlx_lm.models.cache import KVCache as PlainCache

from cortexmlx.attention import model_patches
from cortexmlx.attention.mlx_lm_hook import (
    LayerCache,
    ProbeKV,
    UnhookedAttention,
    group_by_layer,
    install_attention_hook,
    make_mlx_lm_caches,
)
from cortexmlx.attention.paged import AttentionCall
from cortexmlx.attention.recurrent import PROBE_STEP, ObservedState, RecurrentProbe, is_recurrent_cache
from cortexmlx.errors import ModelUnsupported
from cortexmlx.kv.spec import AttentionWindow, KVSpec
from cortexmlx.types.arrays import dtype_name

_log = logging.getLogger(__name__)


_NON_CAUSAL_MODELS = {
    "phi3small": "mlx-lm's code for it adds its causal mask to the scores as ones and zeros, and a token of a prompt "
    "sees some that come after it"
}
"""Why mlx-lm's answers of a model type are not the model's."""


class NotPaged(ModelUnsupported):
    """Raised if a model's attention cannot be paged. mlx-lm may still run it, one sequence at a time."""


class _ProbeCache(LayerCache):
    """A layer's cache in a probe, at position 0 of every row. It records the mask window that the model asks for."""

    def __init__(self, layer: int, rows: int, fetch: Callable[[int, mx.array, mx.array | None], ProbeKV]) -> None:
        super().__init__(layer, fetch)
        self.offset = mx.zeros(rows, mx.int32)
        self._begun = dict(vars(self))
        self.mask_window: int | None = None

    @property
    def is_unused(self) -> bool:
        """Whether the model has put nothing into the cache. It may have asked for a mask, or for a row's position."""
        ignored_names = ("_begun", "mask_window", "sends", "pending_send")
        current_vars = {name: value for name, value in vars(self).items() if name not in ignored_names}
        return current_vars.keys() == self._begun.keys() and all(
            current_vars[name] is value for name, value in self._begun.items()
        )

    def make_mask(self, *_: Any, window_size: int | None = None, **__: Any) -> None:
        """Record the window of the mask that the model asks for; return None."""
        self.mask_window = window_size or self.mask_window


def probe_kv_specs(model: nn.Module) -> list[KVSpec]:
    """Return the KVSpec of each cache (leaf) of a model, found by one lazy forward pass that is never evaluated. Also
    install the attention hook and the model patches.

    Raises NotPaged if a layer keeps something else than keys and values, or attends in another way. Raises
    ModelUnsupported if a token of a prompt sees other tokens than those that are kept for an answer's token.
    """
    if reason := _NON_CAUSAL_MODELS.get(_model_type(model)):
        raise ModelUnsupported(f"{_model_type(model)}: {reason}, so that an answer depends on how its prompt is cut")
    install_attention_hook()
    model_patches.install_model_patches(model)
    mlx_lm_caches = make_mlx_lm_caches(model)
    attention_windows = [
        AttentionWindow() if is_recurrent_cache(cache) else _attention_window_of(model, cache)
        for cache in mlx_lm_caches
    ]
    recurrent = RecurrentProbe(model, mlx_lm_caches)
    handles: dict[int, ProbeKV] = {}

    def fetch(layer: int, keys: mx.array, values: mx.array | None) -> ProbeKV:
        handles[layer] = ProbeKV(keys, values)
        recurrent.record_attention()
        return handles[layer]

    caches = [_ProbeCache(layer, 2, fetch) for layer in range(len(attention_windows))]
    try:
        with recurrent.watch_touches():
            logits = model(mx.zeros((2, 1), mx.int32), cache=group_by_layer(model, recurrent.insert_observed(caches)))
        recurrent.install_hooks()
        if recurrent.leaves:
            parts = [_ProbeCache(layer, PROBE_STEP.tokens, fetch) for layer in range(len(attention_windows))]
            model(
                mx.zeros((PROBE_STEP.tokens, 1), mx.int32),
                cache=group_by_layer(model, recurrent.insert_step_caches(parts)),
            )
        states = {leaf: recurrent.state_spec(leaf, 2) for leaf in recurrent.leaves}
    except ModelUnsupported as error:
        raise NotPaged(f"{_model_type(model)}: {error}") from None
    except Exception as error:  # whatever a model's code raises when it is called in a way that it was not written for
        _log.info("%s fails in a step of two rows", _model_type(model), exc_info=True)
        if "Metal" in str(error):
            raise ModelUnsupported(
                f"{_model_type(model)}: it has Metal kernels of its own, which MLX's build for a CPU cannot run: it "
                "needs an "
                "Apple GPU"
            ) from error
        uses_own_attention = isinstance(error, UnhookedAttention) or ProbeKV.__name__ in str(error)
        cause = "its layers compute with keys and values themselves, not by mlx-lm's attention"
        if not uses_own_attention and recurrent.leaves:
            cause = "mlx-lm's code for it cannot compute a step of several rows in parts"
        elif not uses_own_attention:
            cause = "mlx-lm's code for it cannot compute a step of several rows at different positions"
        raise NotPaged(f"{_model_type(model)}: {cause}, so its attention cannot be paged") from error
    if not isinstance(logits, mx.array):
        raise ModelUnsupported(f"{_model_type(model)}: mlx-lm's code for it returns no logits with these settings")
    paged = [layer for layer in range(len(attention_windows)) if layer not in states]
    unused = [layer for layer in paged if layer not in handles and caches[layer].is_unused]
    bypassed_layers = [
        layer for layer in paged if layer not in unused and (layer not in handles or not handles[layer].was_attended)
    ]
    if bypassed_layers:
        raise NotPaged(f"{_model_type(model)}: layers {bypassed_layers} attend in a way that cannot be paged")
    for cache, attention_window in zip(caches, attention_windows, strict=True):
        if cache.mask_window not in (None, attention_window.tokens):
            kept_text = "all of them" if attention_window.tokens is None else f"only {attention_window.tokens}"
            raise ModelUnsupported(
                f"{_model_type(model)}: a token of a prompt is to see {cache.mask_window} tokens, but {kept_text} are "
                "kept for an "
                "answer's: which of the two is meant is not known"
            )
    states |= dict.fromkeys(unused, KVSpec(0, 0, 0, "float32"))
    return [
        states.get(layer)
        or KVSpec(
            kv_heads=handles[layer].keys.shape[1],
            key_dim=handles[layer].keys.shape[-1],
            value_dim=handles[layer].value_dim,
            dtype=dtype_name(handles[layer].keys.dtype),
            window=attention_window.tokens,
            chunked=attention_window.chunked,
            value_in_key=handles[layer].value_in_key,
        )
        for layer, attention_window in enumerate(attention_windows)
    ]


def build_lazy_logits(model: nn.Module, tokens: mx.array, on_attention: Callable[[], None]) -> mx.array:
    """Return lazy logits, not to be evaluated, of flat tokens `[T, 1]` that are all at position 0. `on_attention` is
    called when a layer attends or touches its state. The model must have been probed.
    """

    return _trace_lazy_pass(model, tokens, on_attention, lambda layer, call: on_attention())


def probe_attention_calls(model: nn.Module) -> tuple[tuple[int, AttentionCall], ...]:
    """Return a probed model's distinct attention calls, each with the number of the cache that it reads."""
    calls: dict[tuple[int, AttentionCall], None] = {}
    _trace_lazy_pass(
        model, mx.zeros((2, 1), mx.int32), lambda: None, lambda layer, call: calls.setdefault((layer, call))
    )
    return tuple(calls)


def trace_decode_step(
    model: nn.Module, positions: mx.array, on_store: Callable[[int, mx.array, mx.array | None], None]
) -> None:
    """Build, but do not evaluate, a decode step of one token per row at `positions`, and call `on_store(layer, keys,
    values)` for what each layer would cache. The model must have been probed.
    """
    _trace_lazy_pass(
        model, mx.zeros((positions.size, 1), mx.int32), lambda: None, lambda *call: None, on_store, positions
    )


def _trace_lazy_pass(
    model: nn.Module,
    tokens: mx.array,
    on_touch: Callable[[], None],
    on_attention: Callable[[int, AttentionCall], None],
    on_store: Callable[[int, mx.array, mx.array | None], None] = lambda *new: None,
    positions: mx.array | None = None,
) -> mx.array:
    """Build a lazy forward pass with probe caches and return its logits. `on_touch` is called for each use of a
    recurrent state, `on_attention(layer, call)` when a layer attends, `on_store(layer, keys, values)` when it caches.
    """

    def fetch(layer: int, keys: mx.array, values: mx.array | None) -> ProbeKV:
        on_store(layer, keys, values)
        return ProbeKV(keys, values, partial(on_attention, layer))

    caches = [
        ObservedState(len(cache.cache), on_touch)
        if is_recurrent_cache(cache)
        else _ProbeCache(layer, tokens.shape[0], fetch)
        for layer, cache in enumerate(make_mlx_lm_caches(model))
    ]
    for cache in caches:
        if positions is not None and isinstance(cache, _ProbeCache):
            cache.offset = positions
    logits: mx.array = model(tokens, cache=group_by_layer(model, caches))
    return logits


def _attention_window_of(model: nn.Module, cache: Any) -> AttentionWindow:
    """Return the attention window of one of mlx-lm's own caches. Raises NotPaged for an unknown kind of cache."""
    if type(cache) is PlainCache:
        return AttentionWindow()
    if type(cache) is RotatingKVCache and cache.keep == 0:
        return AttentionWindow(_require_window(model, cache.max_size))
    if type(cache) is ChunkedKVCache:
        return AttentionWindow(_require_window(model, cache.chunk_size), chunked=True)
    raise NotPaged(f"{_model_type(model)} keeps a {type(cache).__name__} in some layers, which cannot be paged yet")


def _require_window(model: nn.Module, tokens: Any) -> int:
    """Return a window's number of tokens. Raises ModelUnsupported unless it is a positive int."""
    if not isinstance(tokens, int) or isinstance(tokens, bool) or not 0 < tokens < 1 << 31:
        raise ModelUnsupported(
            f"{_model_type(model)}: config.json gives layers a window of {tokens!r} tokens, which is none"
        )
    return tokens


def _model_type(model: nn.Module) -> str:
    """Return the model type of a model for messages."""
    return str(getattr(model, "model_type", type(model).__module__.rpartition(".")[2]))
