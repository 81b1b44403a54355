"""The methods that compute decode attention (one query per row): kernels, MLX operations and the reference path, which
layers and steps each serves, and how a backend chooses.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from cortexmlx.attention import reference
from cortexmlx.attention.mlx_lm_hook import LayerCache, group_by_layer, make_mlx_lm_caches
from cortexmlx.attention.paged import Attend, AttentionCall, AttentionParams, PagedKV
from cortexmlx.attention.recurrent import ObservedState, is_recurrent_cache
from cortexmlx.attention.reference import rounds_coarsely
from cortexmlx.attention.reference_step import ReferenceStep
from cortexmlx.attention.selfcheck import KernelApproval, VariantCheck, check_decode
from cortexmlx.attention.softmax import Softmax, normalize
from cortexmlx.autotune.job import CannotServe
from cortexmlx.kv.arena import KVArena, Slab
from cortexmlx.kv.spec import KVSpec
from cortexmlx.kv.step import GroupStep
from cortexmlx.metal.kernels import DecodeKernels
from cortexmlx.metal.prefill import PrefillVariant
from cortexmlx.metal.rules import Variant, refusal
from cortexmlx.metal.shape import Kernel
from cortexmlx.types.arrays import dtype_name

LayerKey = tuple[Any, ...]
"""Names a `LayerAttention` among those of an engine. It is made for each layer of each step, so it is a plain tuple."""


def layer_key(queries: mx.array, kv: PagedKV, params: AttentionParams) -> LayerKey:
    """Return the key of the layer shape that belongs to these arguments of `paged_attention`."""
    slab = kv.arena.slab(kv.layer)
    return (
        queries.dtype,
        slab[-1].dtype,
        queries.shape[1],
        slab[0].shape[0],
        queries.shape[3],
        kv.arena.spec(kv.layer).value_dim,
        params.softcap,
        None if params.sinks is None else params.sinks.dtype,
        params.slopes is not None,
        kv.quantization,
    )


@dataclass(frozen=True)
class LayerAttention:
    """The shape and options of a layer's attention: dtype, heads, KV spec, scale, softcap, sinks, ALiBi slopes."""

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
    def attention_call(self) -> AttentionCall:
        """The layer's `AttentionCall`."""
        options = self.softcap is not None, self.sinks is not None, self.slopes
        return AttentionCall(self.dtype, self.query_heads, self.spec.key_dim, *options)

    @property
    def rounds_coarsely(self) -> bool:
        """Whether MLX's CPU build rounds this layer's products coarsely: see `reference.rounds_coarsely`."""
        return bool(mx.default_device() == mx.cpu) and not self.dtype == self.spec.dtype == "float32"

    @property
    def label(self) -> str:
        """The layer shape as text for tables and logs."""
        spec = self.spec
        dims = str(spec.key_dim) if spec.key_dim == spec.value_dim else f"{spec.key_dim}/{spec.value_dim}"
        dtype = self.dtype if self.dtype == spec.dtype else f"{self.dtype} on {spec.dtype}"
        options = {
            f"{spec.kv_bits}-bit KV in groups of {spec.kv_group_size}": spec.kv_bits is not None,
            "latent": spec.value_in_key,
            "softcap": self.softcap is not None,
            "sinks" if self.sinks == self.dtype else f"{self.sinks} sinks": self.sinks is not None,
            "alibi": self.slopes,
        }
        heads = f"{self.query_heads} heads on {spec.kv_heads}, head_dim {dims}, blocks of {self.block_size}"
        return ", ".join([f"attention {dtype}", heads, *(name for name, has in options.items() if has)])


def probe_layer_shapes(model: nn.Module, arena: KVArena) -> dict[LayerKey, LayerAttention]:
    """Return the attention shape of each of a model's layers, found by one lazy forward pass that is never evaluated.
    Layers of equal shape are one entry, with the largest of their windows.

    The model must have been probed. The arena needs no blocks.
    """
    layer_shapes: dict[LayerKey, LayerAttention] = {}
    tables, window = np.zeros((2, 1), np.int32), KVSpec(0, 0, 0, "float32").attention_window
    step = GroupStep(tables, np.zeros(2, np.int32), (None,) * 2, (), window)  # two rows that have no tokens

    def record_shape(queries: mx.array, kv: PagedKV, params: AttentionParams) -> mx.array:
        spec = arena.spec(kv.layer)
        layer = LayerAttention(
            dtype_name(queries.dtype),
            queries.shape[1],
            replace(spec, window=None, chunked=False),
            arena.block_size,
            params.scale,
            params.softcap,
            None if params.sinks is None else dtype_name(params.sinks.dtype),
            params.slopes is not None,
            spec.window,
        )
        key = layer_key(queries, kv, params)
        widest_layer = layer_shapes.setdefault(key, layer)
        if widest_layer.window is not None and (layer.window is None or layer.window > widest_layer.window):
            layer_shapes[key] = layer
        return mx.zeros((*queries.shape[:-1], spec.value_dim), queries.dtype)

    def fetch(layer: int, keys: mx.array, values: mx.array | None) -> PagedKV:
        return PagedKV(arena, layer, step, None, 0, keys.dtype, record_shape, quantization=arena.quantization(layer))

    leaves: list[Any] = [
        ObservedState(len(cache.cache), lambda: None) if is_recurrent_cache(cache) else LayerCache(leaf, fetch)
        for leaf, cache in enumerate(make_mlx_lm_caches(model))
    ]
    for leaf in leaves:
        if isinstance(leaf, LayerCache):
            leaf.begin(mx.zeros(step.rows, mx.int32))
    model(mx.zeros((step.rows, 1), mx.int32), cache=group_by_layer(model, leaves))
    return layer_shapes


# BatchClass: the classes of rows and lengths that have a choice of their own.


ROW_BOUNDS = (1, 4, 16)
"""The most rows of each class. More rows are a class, too."""

TOKEN_BOUNDS = (512, 4096)
"""The most tokens that a row of each class sees. More tokens are a class, too."""

_SAMPLE_TOKENS = 8192
"""Tokens on which the class of the longest rows is timed."""


class BatchClass(NamedTuple):
    """A size class of decode steps, by the number of rows and the length of the longest row."""

    rows: int | None
    """The most rows; None: any number."""
    tokens: int | None
    """The most tokens that a row sees; None: any number."""
    run: bool = False
    """Whether it is one row whose blocks are one run."""

    @classmethod
    def from_step(cls, step: GroupStep) -> BatchClass:
        """Return the size class of a decode step. All steps of a decode window are of one class."""
        visible_tokens = step.lengths - step.attention_window.oldest_visible(np.maximum(step.lengths - 1, 0))
        run = step.rows == 1 and step.runs[0] is not None
        return cls(
            _smallest_bound(step.rows, ROW_BOUNDS), _smallest_bound(int(visible_tokens.max()), TOKEN_BOUNDS), run
        )

    @property
    def max_total_tokens(self) -> int | None:
        """The most tokens that all rows of the class see in total; None without a limit."""
        return None if self.rows is None or self.tokens is None else self.rows * self.tokens

    @property
    def label(self) -> str:
        """The class as text for tables, such as "2 to 4 rows, up to 512 tokens"."""
        rows = _describe_range(self.rows, ROW_BOUNDS, "row")
        if self.rows == 1:
            rows += " in one run" if self.run else " in pieces"
        return f"{rows}, {_describe_range(self.tokens, TOKEN_BOUNDS, 'token')}"

    def sample_size(self, max_rows: int, max_tokens: int) -> tuple[int, int]:
        """Return the number of rows, and of tokens in each, with which the class is timed."""
        rows = max_rows if self.rows is None else min(self.rows, max_rows)
        return rows, min(_SAMPLE_TOKENS if self.tokens is None else self.tokens // 2, max_tokens)


def batch_classes(max_rows: int, max_tokens: int) -> list[BatchClass]:
    """Return all classes of steps up to `max_rows` rows and `max_tokens` tokens, the most common (few, short) first."""
    rows = [upper for upper, lower in zip((*ROW_BOUNDS, None), (0, *ROW_BOUNDS), strict=True) if max_rows > lower]
    tokens = [most for most, least in zip((*TOKEN_BOUNDS, None), (0, *TOKEN_BOUNDS), strict=True) if max_tokens > least]
    pairs = [BatchClass(r, t, r == 1) for r in rows for t in tokens]
    return pairs + [BatchClass(1, t) for t in tokens]


def _smallest_bound(number: int, bounds: tuple[int, ...]) -> int | None:
    """Return the smallest bound that is at least `number`; None if all are smaller."""
    return next((bound for bound in bounds if number <= bound), None)


def _describe_range(bound: int | None, bounds: tuple[int, ...], noun: str) -> str:
    """Return the range up to a class's bound as text, such as "5 to 16 rows"."""
    if bound is None:
        return f"more than {bounds[-1]:,} {noun}s"
    lower_bound = next((b for b in reversed(bounds) if b < bound), 0)
    if lower_bound == 0:
        return f"1 {noun}" if bound == 1 else f"up to {bound:,} {noun}s"
    return f"{lower_bound + 1:,} to {bound:,} {noun}s"


# The attention of single tokens, one row after the other: a row's result has the same bits alone and in any batch.
#
# Each operation sees one row's tokens, in the same shapes whatever is computed beside it, and wherever the boundary
# between arena and tail lies. That costs a copy of the tokens, and about ten operations for each row.


def attend_row_by_row(queries: mx.array, kv: PagedKV, params: AttentionParams) -> mx.array:
    """Compute decode attention one row after the other, so that a row's result does not depend on the batch. Arguments
    and result are those of `reference.attend_rows`.
    """
    softmax = Softmax(params, queries.dtype, ReferenceStep.from_handle(kv).ones)
    parts = [_attend_row(queries[row : row + 1], kv, row, softmax) for row in range(kv.step.rows)]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)


def _attend_row(query: mx.array, kv: PagedKV, row: int, softmax: Softmax) -> mx.array:
    """Return the attention of a single row's query `[1, query_heads, 1, dim]`."""
    newest_token = int(kv.step.lengths[row]) + kv.tail_tokens - 1
    oldest_token = kv.step.attention_window.oldest_visible(max(newest_token, 0))
    row_kv = _copy_row_kv(kv, row, oldest_token)
    keys, values = row_kv[0], row_kv[-1] if kv.value_in_key is None else row_kv[0][..., : kv.value_in_key]
    heads, (_, query_heads, _, dim) = keys.shape[0], query.shape
    shape = (heads, query_heads // heads, 1)
    scores = softmax.scale_queries(query).reshape(heads, -1, dim) @ keys.swapaxes(-1, -2)
    distance = partial(ReferenceStep.token_distances, newest_token, newest_token + 1, oldest_token)
    weights, total = softmax.weights(softmax.add_alibi(softmax.scores_from_products(scores), shape, distance), shape)
    return normalize(weights @ values, total).astype(query.dtype).reshape(1, query_heads, 1, -1)


def _copy_row_kv(kv: PagedKV, row: int, oldest_token: int) -> Slab:
    """Return a copy of a row's keys and values from token `oldest_token` on, `[kv_heads, tokens, dim]` each."""
    slots = kv.derived.get(_RowSlots, kv.step).slots_of(row, oldest_token, kv.arena.block_size)
    arrays = [mx.take(array, slots, axis=1) for array in kv.arena.slab(kv.layer)]
    if kv.tail is not None:
        column = max(0, oldest_token - int(kv.step.lengths[row]))
        tail_arrays = [array[row, :, column : kv.tail_tokens] for array in kv.tail]
        arrays = [mx.concatenate(list(pair), axis=1) for pair in zip(arrays, tail_arrays, strict=True)]
    # What `take` returns lies in another order: a product with it would be rounded in another way.
    arrays = [mx.contiguous(array) for array in arrays]
    return tuple(arrays) if kv.quantization is None else kv.quantization.dequantize(arrays)


class _RowSlots:
    """The arena slots of each row's tokens. They are kept for a step, or for a decode window if all tokens are seen."""

    def __init__(self, step: GroupStep) -> None:
        self._step = step
        self._slots: dict[int, tuple[int, mx.array]] = {}

    def slots_of(self, row: int, oldest_token: int, block_size: int) -> mx.array:
        """Return the arena slots of a row's tokens from `oldest_token` on, `[tokens]` int32."""
        cached = self._slots.get(row)
        if cached is None or cached[0] != oldest_token:
            position = np.arange(oldest_token, int(self._step.lengths[row]))
            slots = self._step.tables[row, position // block_size] * block_size + position % block_size
            self._slots[row] = cached = (oldest_token, mx.array(slots.astype(np.int32)))
        return cached[1]


# The methods to compute the attention of single tokens, which classes each serves, and those that are not the kernels'.
#
# All have the arguments and the result of `reference.attend_rows`.


MAX_COPIED_BYTES = 64 << 20
"""Bytes of keys and values that a method may copy in a layer. A class whose steps may be larger has no such method."""


class DecodeMethod(Enum):
    """A method that computes decode attention. The value is its name in tables and on disk."""

    VECTOR = "vector kernel"
    MATRIX = "matrix kernel"
    WIDE = "wide kernel"
    REFERENCE = "reference path"
    VIEW = "MLX over the view"
    """MLX's attention over the view of a lone row's run, followed by a copy of the tail."""
    GATHER = "MLX over a gather"
    """MLX's attention over a copy of all rows' tokens, each row as long as the longest."""
    ROWS = "row by row"
    """One row after the other, so that no row depends on its neighbours. It is not timed: it is for `reproducible`."""


KERNEL_METHODS = {
    DecodeMethod.VECTOR: Kernel.VECTOR,
    DecodeMethod.MATRIX: Kernel.MATRIX,
    DecodeMethod.WIDE: Kernel.WIDE,
}
"""The methods that are kernels of ours."""


def attend_view(queries: mx.array, kv: PagedKV, params: AttentionParams) -> mx.array:
    """Compute one row's decode attention by MLX over a view of its consecutive blocks. A tail is joined by copying."""
    run = kv.step.runs[0]
    assert run is not None
    length, tail_tokens = int(kv.step.lengths[0]), kv.tail_tokens
    oldest_token = kv.step.attention_window.oldest_visible(max(length + tail_tokens - 1, 0))
    arena_start = min(oldest_token, length)
    keys, values = (array[:, arena_start:] for array in kv.arena.view(kv.layer, run, length))
    if kv.tail is not None:
        tail_arrays = [array[0, :, oldest_token - arena_start : tail_tokens] for array in kv.tail]
        keys, values = mx.concatenate([keys, tail_arrays[0]], axis=1), mx.concatenate([values, tail_arrays[1]], axis=1)
    out = mx.fast.scaled_dot_product_attention(
        queries[:1], keys[None], values[None], scale=params.scale, sinks=params.sinks
    )
    return out.astype(queries.dtype)


def attend_gather(queries: mx.array, kv: PagedKV, params: AttentionParams) -> mx.array:
    """Compute decode attention by MLX's attention over a padded copy of all rows' tokens, with a mask."""
    softmax = Softmax(params, queries.dtype, ReferenceStep.from_handle(kv).ones)
    return reference.attend_gathered(queries[: kv.step.rows], kv, softmax).astype(queries.dtype)


MLX_METHODS: dict[DecodeMethod, Attend] = {
    DecodeMethod.REFERENCE: reference.attend_rows,
    DecodeMethod.VIEW: attend_view,
    DecodeMethod.GATHER: attend_gather,
    DecodeMethod.ROWS: attend_row_by_row,
}
"""The methods that are operations of MLX."""


def mlx_methods_for(layer: LayerAttention, batch: BatchClass) -> tuple[DecodeMethod, ...]:
    """Return the MLX methods for a layer in a class of steps: the reference first, then those that may be faster."""
    spec, max_tokens = layer.spec, batch.max_total_tokens
    numbers = spec.kv_heads * sum(spec.dims) * spec.itemsize
    if (
        layer.rounds_coarsely
        or max_tokens is None
        or max_tokens * numbers > MAX_COPIED_BYTES
        or spec.value_in_key
        or layer.slopes
    ):
        return (DecodeMethod.REFERENCE,)
    if batch.run:
        supports_view = spec.kv_bits is None and layer.softcap is None
        return (DecodeMethod.REFERENCE, DecodeMethod.VIEW) if supports_view else (DecodeMethod.REFERENCE,)
    return (
        (DecodeMethod.REFERENCE,)
        if layer.sinks and layer.softcap is not None
        else (DecodeMethod.REFERENCE, DecodeMethod.GATHER)
    )


# DecodeChoices: the method that each layer's single tokens take in each class of steps. ReferenceAttention: the
# reference backend with such choices.


class DecodeChoices:
    """Which decode method each layer uses in each class of steps. Where nothing is chosen, the backend's rules decide.

    A step's class is what its decode window began with, and choices change only while nothing is computed. So a row
    keeps its method within a window.
    """

    def __init__(self) -> None:
        self.reproducible = False
        """Whether one method serves a layer in all classes, with the same bits for a row alone and in any batch."""
        self._methods: dict[tuple[LayerKey, BatchClass], DecodeMethod] = {}

    def set_methods(self, methods: Mapping[tuple[LayerKey, BatchClass], DecodeMethod]) -> None:
        """Use these methods from now on, and the backend's rules for everything else."""
        self._methods = dict(methods)

    def method_for(self, key: LayerKey, kv: PagedKV) -> DecodeMethod | None:
        """Return the chosen method of a layer in the step of `kv`; None if the backend's rules decide."""
        if not self._methods:
            return None
        return self._methods.get((key, kv.derived.get(BatchClass.from_step, kv.step)))


class SelectableBackend(Protocol):
    """Protocol of a backend whose decode methods can be selected through its `choices`."""

    choices: DecodeChoices

    @property
    def attend(self) -> Attend:
        """The function that computes attention with the selected methods."""

    def kernel_methods(self, layer: LayerAttention) -> tuple[DecodeMethod, ...]:
        """Return the backend's own kernel methods that serve a layer, the default first."""

    def reproducible_method(self, layer: LayerAttention) -> DecodeMethod:
        """Return the method that serves a layer when `choices.reproducible` is set."""

    def attend_with(self, method: DecodeMethod, layer: LayerAttention) -> Attend:
        """Return the function that computes a layer's decode attention with a method. Raises CannotServe."""


def reproducible_mlx_method(coarse: bool, softcap: bool, sinks: bool, slopes: bool) -> DecodeMethod:
    """Return the MLX method that gives a row the same bits alone and in any batch. It is the row-by-row method, or the
    reference path on a CPU that rounds coarsely (`coarse`), if some mlx-lm model has these options.
    """
    of_no_model = slopes or (softcap and sinks)
    return DecodeMethod.REFERENCE if coarse and not of_no_model else DecodeMethod.ROWS


class ReferenceAttention:
    """The reference backend with selectable decode methods."""

    def __init__(self) -> None:
        self.choices = DecodeChoices()

    def attend(self, queries: mx.array, kv: PagedKV, params: AttentionParams) -> mx.array:
        """Compute `paged_attention` with the reference path and the selected methods."""
        parts = []
        if kv.step.rows:
            method = self._method_for(queries, kv, params)
            attend_rows = reference.attend_rows if method is None else MLX_METHODS[method]
            parts.append(attend_rows(queries, kv, params))
        if kv.step.pieces:
            reproducible = self.choices.reproducible
            parts += reference.attend_pieces(queries, kv, params, one_by_one=reproducible)
        return parts[0] if len(parts) == 1 else mx.concatenate(parts)

    def _method_for(self, queries: mx.array, kv: PagedKV, params: AttentionParams) -> DecodeMethod | None:
        """Return the selected decode method. None means the default rules of `reference.attend_rows`."""
        if self.choices.reproducible:
            call = AttentionCall.from_arguments(queries, params)
            return reproducible_mlx_method(rounds_coarsely(queries, kv), call.softcap, call.sinks, call.slopes)
        return self.choices.method_for(layer_key(queries, kv, params), kv)

    def kernel_methods(self, layer: LayerAttention) -> tuple[DecodeMethod, ...]:
        """Return no methods: the reference backend has no kernels."""
        return ()

    def reproducible_method(self, layer: LayerAttention) -> DecodeMethod:
        """Return the method that serves a layer when `choices.reproducible` is set."""
        return reproducible_mlx_method(
            layer.rounds_coarsely, layer.softcap is not None, layer.sinks is not None, layer.slopes
        )

    def attend_with(self, method: DecodeMethod, layer: LayerAttention) -> Attend:
        """Return the function that computes a layer's decode attention with a method."""
        return MLX_METHODS[method]


# Which kernel, or which plain method instead of it, serves a layer's single tokens on the Metal backend.


_log = logging.getLogger(__name__)

KernelVariant = TypeVar("KernelVariant", Variant, PrefillVariant)


class KernelSelector:
    """Selects each layer shape's decode kernel, or an MLX method instead: by rules, choices and a check per variant."""

    def __init__(self, kernels: DecodeKernels, approval: KernelApproval) -> None:
        self.choices = DecodeChoices()
        self._kernels = kernels
        self._approval = approval
        self._checks: dict[Variant, VariantCheck] = {}

    def clear_checks(self) -> None:
        """Forget all check results, so that every kernel is checked again at its next use."""
        self._checks.clear()

    def select(self, variant: Variant, method: DecodeMethod | None) -> Variant | Attend:
        """Return the kernel variant or MLX method that computes a layer shape. `method` is the chosen one. If it is
        None, or its kernel is disabled, return `variant` if that is approved, else the reference path (with
        `choices.reproducible`, the reproducible MLX method).
        """
        if method in MLX_METHODS:
            return MLX_METHODS[method]
        if method is not None:
            forced_variant = _replace_kernel(variant, method)
            if self.refusal_reason(forced_variant) is None:
                return forced_variant
        if self.is_approved(variant):
            return variant
        if not self.choices.reproducible:
            return reference.attend_rows
        return MLX_METHODS[reproducible_mlx_method(False, variant.softcap, variant.sinks, variant.alibi)]

    def is_approved(self, variant: Variant) -> bool:
        """Return whether rules and check allow a kernel variant. Several threads may ask for different variants."""
        return self._approval.is_approved(variant, refusal(variant), lambda: self._check_result(variant))

    def refusal_reason(self, variant: Variant) -> str | None:
        """Return why a kernel variant is not allowed; None if it is. A failed check is logged once."""
        reason = refusal(variant)
        if reason is not None or not self._approval.check:
            return reason
        new, check = variant not in self._checks, self._check_result(variant)
        if check.agrees:
            return None
        if new:
            _log.warning(
                "attention (%s) is not computed by this kernel: %s", variant.label, check.message or check.outcome
            )
        return check.outcome

    def _check_result(self, variant: Variant) -> VariantCheck:
        """Return what the check of a kernel variant found. The first call runs the check."""
        if variant not in self._checks:
            self._checks[variant] = check_decode(self._kernels, variant)
        return self._checks[variant]


class SelectableKernels:
    """A backend of kernels with selectable decode methods. `decode` takes a variant and `Attend`'s arguments."""

    def __init__(self, selector: KernelSelector, attend: Attend, decode: Callable[..., Any]) -> None:
        self.choices = selector.choices
        self.attend = attend
        self._selector = selector
        self._decode = decode

    def kernel_methods(self, layer: LayerAttention) -> tuple[DecodeMethod, ...]:
        """Return the kernel methods that the rules allow for a layer, the default first."""
        variant = _default_variant(layer)
        default_method = DecodeMethod(f"{variant.kernel.value} kernel")
        methods = (default_method, *(method for method in KERNEL_METHODS if method is not default_method))
        return tuple(method for method in methods if refusal(_replace_kernel(variant, method)) is None)

    def reproducible_method(self, layer: LayerAttention) -> DecodeMethod:
        """Return the layer's default kernel, or the row-by-row method if no kernel serves it."""
        return next(iter(self.kernel_methods(layer)), DecodeMethod.ROWS)

    def attend_with(self, method: DecodeMethod, layer: LayerAttention) -> Attend:
        """Return the function that computes a layer's decode attention with a method. Raises CannotServe."""
        if method in MLX_METHODS:
            return MLX_METHODS[method]
        variant = _replace_kernel(_default_variant(layer), method)
        reason = self._selector.refusal_reason(variant)
        if reason is not None:
            raise CannotServe(reason)
        return partial(self._decode, variant)


def _replace_kernel(variant: Variant, method: DecodeMethod) -> Variant:
    """Return the variant, changed to use the kernel of `method`."""
    kernel = KERNEL_METHODS[method]
    return variant if variant.kernel is kernel else replace(variant, forced_kernel=kernel)


def _default_variant(layer: LayerAttention) -> Variant:
    """Return the kernel variant that the rules choose for a layer."""
    return make_variant(Variant, layer.attention_call, layer.spec, layer.block_size)


def make_variant(kind: type[KernelVariant], call: AttentionCall, spec: KVSpec, block_size: int) -> KernelVariant:
    """Return the kernel variant of class `kind` for a layer's call and KV spec."""
    return kind(
        dtype=call.dtype,
        kv_dtype=spec.dtype,
        key_dim=call.query_dim,
        value_dim=spec.value_dim,
        block_size=block_size,
        group=call.query_heads // spec.kv_heads,
        softcap=call.softcap,
        sinks=call.sinks,
        alibi=call.slopes,
        latent=spec.value_in_key,
        kv_bits=spec.kv_bits,
        quant_group=spec.kv_group_size,
    )
