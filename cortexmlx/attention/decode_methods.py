"""The methods by which the attention of single tokens is computed: which layers and classes of steps each serves, and
which one a backend takes.
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
from cortexmlx.attention.mlx_lm_hook import LayerCache, arranged, own_caches
from cortexmlx.attention.paged import Attend, AttentionCall, AttentionParams, PagedKV
from cortexmlx.attention.recurrent import NotedState, is_state
from cortexmlx.attention.reference import rounds_coarsely
from cortexmlx.attention.reference_step import ReferenceStep
from cortexmlx.attention.selfcheck import Approval, VariantCheck, check_variant
from cortexmlx.attention.softmax import Softmax, divided
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
    """Return the key of a layer that asks for the attention of `queries`."""
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

    def attend(queries: mx.array, kv: PagedKV, params: AttentionParams) -> mx.array:
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


# BatchClass: the classes of rows and lengths that have a choice of their own.


ROWS = (1, 4, 16)
"""The most rows of each class. More rows are a class, too."""

TOKENS = (512, 4096)
"""The most tokens that a row of each class sees. More tokens are a class, too."""

_LONG = 8192
"""Tokens on which the class of the longest rows is timed."""


class BatchClass(NamedTuple):
    """A class of decode steps, by the number of rows and the longest of them."""

    rows: int | None
    """The most rows; None: any number."""
    tokens: int | None
    """The most tokens that a row sees; None: any number."""
    run: bool = False
    """Whether it is one row whose blocks are one run."""

    @classmethod
    def of(cls, step: GroupStep) -> BatchClass:
        """Return the class of a step's single-token queries. It depends on what a decode window begins with, so it is
        the same for all steps of the window.
        """
        seen = step.lengths - step.attention_window.oldest(np.maximum(step.lengths - 1, 0))
        run = step.rows == 1 and step.runs[0] is not None
        return cls(_least(step.rows, ROWS), _least(int(seen.max()), TOKENS), run)

    @property
    def most(self) -> int | None:
        """The most tokens that all rows see together, if each is as long as the longest; None: any number."""
        return None if self.rows is None or self.tokens is None else self.rows * self.tokens

    @property
    def label(self) -> str:
        """The class in a line of a table."""
        rows = _words(self.rows, ROWS, "row")
        if self.rows == 1:
            rows += " in one run" if self.run else " in pieces"
        return f"{rows}, {_words(self.tokens, TOKENS, 'token')}"

    def sample(self, max_rows: int, longest: int) -> tuple[int, int]:
        """Return the rows, and the tokens of each, on which the class is timed."""
        rows = max_rows if self.rows is None else min(self.rows, max_rows)
        return rows, min(_LONG if self.tokens is None else self.tokens // 2, longest)


def classes(max_rows: int, longest: int) -> list[BatchClass]:
    """Return the classes of the steps of up to `max_rows` rows that see up to `longest` tokens, the usual ones first:
    few rows, and short ones.
    """
    rows = [most for most, least in zip((*ROWS, None), (0, *ROWS), strict=True) if max_rows > least]
    tokens = [most for most, least in zip((*TOKENS, None), (0, *TOKENS), strict=True) if longest > least]
    pairs = [BatchClass(r, t, r == 1) for r in rows for t in tokens]
    return pairs + [BatchClass(1, t) for t in tokens]


def _least(number: int, most: tuple[int, ...]) -> int | None:
    return next((bound for bound in most if number <= bound), None)


def _words(bound: int | None, bounds: tuple[int, ...], noun: str) -> str:
    if bound is None:
        return f"more than {bounds[-1]:,} {noun}s"
    before = next((b for b in reversed(bounds) if b < bound), 0)
    if before == 0:
        return f"1 {noun}" if bound == 1 else f"up to {bound:,} {noun}s"
    return f"{before + 1:,} to {bound:,} {noun}s"


# The attention of single tokens, one row after the other: a row's result has the same bits alone and in any batch.
#
# Each operation sees one row's tokens, in the same shapes whatever is computed beside it, and wherever the boundary
# between arena and tail lies. That costs a copy of the tokens, and about ten operations for each row.


def attend_row_by_row(queries: mx.array, kv: PagedKV, params: AttentionParams) -> mx.array:
    """See `reference.attend_rows`."""
    softmax = Softmax(params, queries.dtype, ReferenceStep.of(kv).ones)
    parts = [_attend_row(queries[row : row + 1], kv, row, softmax) for row in range(kv.step.rows)]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)


def _attend_row(query: mx.array, kv: PagedKV, row: int, softmax: Softmax) -> mx.array:
    """Attend with one query `[1, query_heads, 1, dim]` of a row."""
    newest = int(kv.step.lengths[row]) + kv.tail_tokens - 1
    oldest = kv.step.attention_window.oldest(max(newest, 0))
    seen = _tokens(kv, row, oldest)
    keys, values = seen[0], seen[-1] if kv.value_in_key is None else seen[0][..., : kv.value_in_key]
    heads, (_, query_heads, _, dim) = keys.shape[0], query.shape
    shape = (heads, query_heads // heads, 1)
    scores = softmax.scaled(query).reshape(heads, -1, dim) @ keys.swapaxes(-1, -2)
    distance = partial(ReferenceStep.distance, newest, newest + 1, oldest)
    weights, total = softmax.weights(softmax.biased(softmax.capped(scores), shape, distance), shape)
    return divided(weights @ values, total).astype(query.dtype).reshape(1, query_heads, 1, -1)


def _tokens(kv: PagedKV, row: int, oldest: int) -> Slab:
    """Return a copy of the keys and values of a row's tokens from `oldest` on, `[kv_heads, tokens, dim]` each."""
    slots = kv.derived.get(_RowSlots, kv.step).of(row, oldest, kv.arena.block_size)
    arrays = [mx.take(array, slots, axis=1) for array in kv.arena.slab(kv.layer)]
    if kv.tail is not None:
        column = max(0, oldest - int(kv.step.lengths[row]))
        newest = [array[row, :, column : kv.tail_tokens] for array in kv.tail]
        arrays = [mx.concatenate(list(both), axis=1) for both in zip(arrays, newest, strict=True)]
    # What `take` returns lies in another order: a product with it would be rounded in another way.
    arrays = [mx.contiguous(array) for array in arrays]
    return tuple(arrays) if kv.quantization is None else kv.quantization.dequantize(arrays)


class _RowSlots:
    """The slots of a step's rows, made once for all layers, and in layers without a window for a whole decode
    window.
    """

    def __init__(self, step: GroupStep) -> None:
        self._step = step
        self._slots: dict[int, tuple[int, mx.array]] = {}

    def of(self, row: int, oldest: int, block_size: int) -> mx.array:
        """Return the slots of a row's tokens in the arena from `oldest` on, `[tokens]` int32."""
        known = self._slots.get(row)
        if known is None or known[0] != oldest:
            position = np.arange(oldest, int(self._step.lengths[row]))
            slots = self._step.tables[row, position // block_size] * block_size + position % block_size
            self._slots[row] = known = (oldest, mx.array(slots.astype(np.int32)))
        return known[1]


# The methods to compute the attention of single tokens, which classes each serves, and those that are not the kernels'.
#
# All have the arguments and the result of `reference.attend_rows`.


MOST_COPIED = 64 << 20
"""Bytes of keys and values that a method may copy in a layer. A class whose steps may be larger has no such method."""


class DecodeMethod(Enum):
    """A method to compute the attention of single tokens. The value names it in tables, on disk too."""

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


KERNELS = {DecodeMethod.VECTOR: Kernel.VECTOR, DecodeMethod.MATRIX: Kernel.MATRIX, DecodeMethod.WIDE: Kernel.WIDE}
"""The methods that are kernels of ours."""


def over_view(queries: mx.array, kv: PagedKV, params: AttentionParams) -> mx.array:
    """Attend with a lone row that is one run, by MLX's attention. In a step without a tail nothing is copied."""
    run = kv.step.runs[0]
    assert run is not None
    length, tail = int(kv.step.lengths[0]), kv.tail_tokens
    oldest = kv.step.attention_window.oldest(max(length + tail - 1, 0))
    begin = min(oldest, length)
    keys, values = (array[:, begin:] for array in kv.arena.view(kv.layer, run, length))
    if kv.tail is not None:
        newest = [array[0, :, oldest - begin : tail] for array in kv.tail]
        keys, values = mx.concatenate([keys, newest[0]], axis=1), mx.concatenate([values, newest[1]], axis=1)
    out = mx.fast.scaled_dot_product_attention(
        queries[:1], keys[None], values[None], scale=params.scale, sinks=params.sinks
    )
    return out.astype(queries.dtype)


def over_gather(queries: mx.array, kv: PagedKV, params: AttentionParams) -> mx.array:
    """Attend by MLX's attention over a copy of each row's tokens, with a mask."""
    softmax = Softmax(params, queries.dtype, ReferenceStep.of(kv).ones)
    return reference.attend_gathered(queries[: kv.step.rows], kv, softmax).astype(queries.dtype)


PLAIN: dict[DecodeMethod, Attend] = {
    DecodeMethod.REFERENCE: reference.attend_rows,
    DecodeMethod.VIEW: over_view,
    DecodeMethod.GATHER: over_gather,
    DecodeMethod.ROWS: attend_row_by_row,
}
"""The methods that are operations of MLX."""


def plain_methods(layer: LayerAttention, batch: BatchClass) -> tuple[DecodeMethod, ...]:
    """Return the methods of `PLAIN` that serve a class of steps, the reference path first. Below float32 a CPU has that
    one only (see `reference.rounds_coarsely`).
    """
    spec, most = layer.spec, batch.most
    numbers = spec.kv_heads * sum(spec.dims) * spec.itemsize
    if layer.coarse or most is None or most * numbers > MOST_COPIED or spec.value_in_key or layer.slopes:
        return (DecodeMethod.REFERENCE,)
    if batch.run:
        plain = spec.kv_bits is None and layer.softcap is None
        return (DecodeMethod.REFERENCE, DecodeMethod.VIEW) if plain else (DecodeMethod.REFERENCE,)
    return (
        (DecodeMethod.REFERENCE,)
        if layer.sinks and layer.softcap is not None
        else (DecodeMethod.REFERENCE, DecodeMethod.GATHER)
    )


# DecodeChoices: the method that each layer's single tokens take in each class of steps. ReferenceAttention: the
# reference backend with such choices.


class DecodeChoices:
    """The choices of a backend. Without any, its rules choose.

    A step's class is what its decode window began with, and choices change only while nothing is computed. So a row
    keeps its method within a window.
    """

    def __init__(self) -> None:
        self.reproducible = False
        """Whether one method serves a layer in all classes, with the same bits for a row alone and in any batch."""
        self._ways: dict[tuple[LayerKey, BatchClass], DecodeMethod] = {}

    def take(self, methods: Mapping[tuple[LayerKey, BatchClass], DecodeMethod]) -> None:
        """Use these methods from now on, and the rules for everything else."""
        self._ways = dict(methods)

    def method(self, key: LayerKey, kv: PagedKV) -> DecodeMethod | None:
        """Return the method for a layer in its step; None: the rules choose."""
        if not self._ways:
            return None
        return self._ways.get((key, kv.derived.get(BatchClass.of, kv.step)))


class ChoosingBackend(Protocol):
    """A backend that takes the method it is told."""

    choices: DecodeChoices

    @property
    def attend(self) -> Attend:
        """What computes attention as it is told."""

    def own_methods(self, layer: LayerAttention) -> tuple[DecodeMethod, ...]:
        """Return the methods that serve a layer and are not in `PLAIN`. The first is the rules' choice."""

    def fixed_method(self, layer: LayerAttention) -> DecodeMethod:
        """Return the method that serves a layer if `choices.reproducible`."""

    def attend_by(self, method: DecodeMethod, layer: LayerAttention) -> Attend:
        """Return what computes a layer's single tokens by a method. Raises CannotServe."""


def reproducible_method(coarse: bool, softcap: bool, sinks: bool, slopes: bool) -> DecodeMethod:
    """Return the plain method in which a row has the same bits alone and in any batch. Where a CPU rounds coarsely
    (`reference.rounds_coarsely`), that is already so on the reference path, unless no model attends so.
    """
    of_no_model = slopes or (softcap and sinks)
    return DecodeMethod.REFERENCE if coarse and not of_no_model else DecodeMethod.ROWS


class ReferenceAttention:
    """The reference backend."""

    def __init__(self) -> None:
        self.choices = DecodeChoices()

    def attend(self, queries: mx.array, kv: PagedKV, params: AttentionParams) -> mx.array:
        """See `paged_attention`."""
        parts = []
        if kv.step.rows:
            method = self._method(queries, kv, params)
            attend_rows = reference.attend_rows if method is None else PLAIN[method]
            parts.append(attend_rows(queries, kv, params))
        if kv.step.pieces:
            apart = self.choices.reproducible
            parts += reference.attend_pieces(queries, kv, params, apart=apart)
        return parts[0] if len(parts) == 1 else mx.concatenate(parts)

    def _method(self, queries: mx.array, kv: PagedKV, params: AttentionParams) -> DecodeMethod | None:
        """Return the method of a step; None: the rules of `reference.attend_rows`."""
        if self.choices.reproducible:
            call = AttentionCall.of(queries, params)
            return reproducible_method(rounds_coarsely(queries, kv), call.softcap, call.sinks, call.slopes)
        return self.choices.method(layer_key(queries, kv, params), kv)

    def own_methods(self, layer: LayerAttention) -> tuple[DecodeMethod, ...]:
        """See `ChoosingBackend`."""
        return ()

    def fixed_method(self, layer: LayerAttention) -> DecodeMethod:
        """See `ChoosingBackend`."""
        return reproducible_method(layer.coarse, layer.softcap is not None, layer.sinks is not None, layer.slopes)

    def attend_by(self, method: DecodeMethod, layer: LayerAttention) -> Attend:
        """See `ChoosingBackend`."""
        return PLAIN[method]


# Which kernel, or which plain method instead of it, serves a layer's single tokens on the Metal backend.


_log = logging.getLogger(__name__)

OfLayer = TypeVar("OfLayer", Variant, PrefillVariant)


class KernelMethods:
    """The kernels that may serve, by their rules and by the check of each variant, and the choices among them."""

    def __init__(self, kernels: DecodeKernels, approval: Approval) -> None:
        self.choices = DecodeChoices()
        self._kernels = kernels
        self._approval = approval
        self._checks: dict[Variant, VariantCheck] = {}

    def forget_checks(self) -> None:
        """Check every kernel again at its next use."""
        self._checks.clear()

    def serving(self, variant: Variant, method: DecodeMethod | None) -> Variant | Attend:
        """Return what serves a shape by a method: a variant of the kernels, or a plain method. For None, or if the
        method's kernel is disabled, the rules choose: `variant`, or the reference path if that may not serve.
        """
        if method in PLAIN:
            return PLAIN[method]
        if method is not None:
            forced = _forced(variant, method)
            if self.refusal(forced) is None:
                return forced
        if self.approve(variant):
            return variant
        if not self.choices.reproducible:
            return reference.attend_rows
        return PLAIN[reproducible_method(False, variant.softcap, variant.sinks, variant.alibi)]

    def approve(self, variant: Variant) -> bool:
        """Return whether a variant may serve, by the rules and its check. Several threads may ask for different
        variants.
        """
        return self._approval.of(variant, refusal(variant), lambda: self._check(variant))

    def refusal(self, variant: Variant) -> str | None:
        """Return why a kernel may not serve; None if it may. A check that fails is logged once."""
        reason = refusal(variant)
        if reason is not None or not self._approval.check:
            return reason
        new, check = variant not in self._checks, self._check(variant)
        if check.agrees:
            return None
        if new:
            _log.warning(
                "attention (%s) is not computed by this kernel: %s", variant.label, check.message or check.outcome
            )
        return check.outcome

    def _check(self, variant: Variant) -> VariantCheck:
        if variant not in self._checks:
            self._checks[variant] = check_variant(self._kernels, variant)
        return self._checks[variant]


class KernelChoosing:
    """The `ChoosingBackend` of the kernels. `decode(variant, ...)` computes attention by a kernel, with the further
    arguments of `Attend`.
    """

    def __init__(self, methods: KernelMethods, attend: Attend, decode: Callable[..., Any]) -> None:
        self.choices = methods.choices
        self.attend = attend
        self._ways = methods
        self._decode = decode

    def own_methods(self, layer: LayerAttention) -> tuple[DecodeMethod, ...]:
        """See `ChoosingBackend`."""
        variant = _variant_of(layer)
        usual = DecodeMethod(f"{variant.kernel.value} kernel")
        methods = (usual, *(method for method in KERNELS if method is not usual))
        return tuple(method for method in methods if refusal(_forced(variant, method)) is None)

    def fixed_method(self, layer: LayerAttention) -> DecodeMethod:
        """See `ChoosingBackend`."""
        return next(iter(self.own_methods(layer)), DecodeMethod.ROWS)

    def attend_by(self, method: DecodeMethod, layer: LayerAttention) -> Attend:
        """See `ChoosingBackend`."""
        if method in PLAIN:
            return PLAIN[method]
        variant = _forced(_variant_of(layer), method)
        reason = self._ways.refusal(variant)
        if reason is not None:
            raise CannotServe(reason)
        return partial(self._decode, variant)


def _forced(variant: Variant, method: DecodeMethod) -> Variant:
    """Return the variant on the kernel of a method."""
    kernel = KERNELS[method]
    return variant if variant.kernel is kernel else replace(variant, forced=kernel)


def _variant_of(layer: LayerAttention) -> Variant:
    """Return the variant of a layer, on the kernel that the rules choose."""
    return shape_of(Variant, layer.call, layer.spec, layer.block_size)


def shape_of(kind: type[OfLayer], call: AttentionCall, spec: KVSpec, block_size: int) -> OfLayer:
    """Return the variant of a kernel for a layer's call."""
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
