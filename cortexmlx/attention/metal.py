"""The Metal backend: decode kernels for single-token queries; for prefill pieces the prefill kernel or, if that does
not serve, MLX's attention.

What the kernels need to know of a step is made in NumPy once per decode window (block tables) and once per step (work
list), and shared by all layers. A kernel variant is checked against the reference before its first use. A variant that
disagrees, and a shape that the kernels do not serve, take the reference path, and a note says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import mlx.core as mx
import numpy as np

from cortexmlx.attention import reference
from cortexmlx.attention.decode_methods import (
    DecodeMethod,
    KernelSelector,
    KernelVariant,
    LayerKey,
    layer_key,
    make_variant,
)
from cortexmlx.attention.paged import Attend, AttentionCall, AttentionParams, PagedKV, StepDerivedData
from cortexmlx.attention.selfcheck import KernelApproval, KernelCheck, check_prefill
from cortexmlx.errors import KVBlockError
from cortexmlx.kv.arena import QUANTIZED_PARTS, Slab
from cortexmlx.kv.spec import AttentionWindow, LayerGroup
from cortexmlx.kv.step import GroupStep, PrefillPiece
from cortexmlx.metal.kernels import DecodeInputs, DecodeKernels, KernelFactory
from cortexmlx.metal.prefill import PrefillInputs, PrefillKernel, PrefillVariant, reason_for_our_kernel, refusal
from cortexmlx.metal.rules import Variant
from cortexmlx.metal.work import SMALL, make_prefill_work_list, make_work_list, pad_tables

_CHECKED_TAIL_TOKENS = 2
"""The step of a decode window at which the slabs are checked. Whatever wrote them before the window has finished by
then, so nothing has to wait, and nothing writes them in between.
"""


@dataclass(frozen=True)
class _DecodeWork:
    """A decode work list on the device, for `tail_tokens` columns of the tail and partitions of `partition` tokens."""

    tail_tokens: int
    partition: int
    items: int
    plan: mx.array


class DecodeKernelStep:
    """The data of a step on the device for the decode kernels: block tables, and the newest work list."""

    def __init__(self, step: GroupStep) -> None:
        self._step = step
        self._work: _DecodeWork | None = None
        self.tables = mx.array(pad_tables(step.tables))

    def work_list(self, tail_tokens: int, partition: int) -> _DecodeWork:
        """Return the work list for `tail_tokens` columns of the tail and partitions of `partition` tokens."""
        step, cached = self._step, self._work
        if cached is not None and (cached.tail_tokens, cached.partition) == (tail_tokens, partition):
            return cached
        work = make_work_list(step.lengths, tail_tokens, step.attention_window, partition)
        self._work = new_work = _DecodeWork(tail_tokens, partition, work.items, mx.array(work.plan))
        return new_work


class MetalAttention:
    """Computes `paged_attention` by Metal kernels of `factory`: `mx.fast.metal_kernel`, or the simulator's.

    With `check`, each variant is compared with attention in float64 at first use, and disabled if it disagrees. That
    compiles what the step would compile anyway. `matrix_units` says whether MLX's products have units of their own.
    Only the thread that evaluates the steps may use it, but any may run its checks. `methods` decides what serves.
    """

    def __init__(self, factory: KernelFactory, *, check: bool = True, matrix_units: bool = False) -> None:
        self._kernels = DecodeKernels(factory)
        self._approval = KernelApproval(check)
        self.prefill = MetalPrefill(factory, self._approval, matrix_units=matrix_units)
        self.methods = KernelSelector(self._kernels, self._approval)
        self._selected_methods: dict[tuple[LayerKey, DecodeMethod | None], Variant | Attend] = {}
        self._factors: dict[tuple[float, float], mx.array] = {}
        self._per_head: dict[tuple[str, int], tuple[mx.array, mx.array]] = {}
        self._no_tail: dict[tuple[int, mx.Dtype], mx.array] = {}
        self._nothing_per_head = mx.zeros(SMALL)

    def notes(self) -> tuple[str, ...]:
        """Return one note for each variant left to the reference path, with its label and the reason."""
        return tuple(f"{label}: {reason}" for label, reason in sorted(self._approval.notes.items()))

    def kernel_checks(
        self, calls: Iterable[tuple[int, AttentionCall]], groups: Iterable[LayerGroup], block_size: int
    ) -> list[KernelCheck]:
        """Return the checks to run before the first step: one for each kernel variant that layers with these `calls`
        need. After them no step compiles a kernel, however many rows, tokens and tail columns it has: inputs are padded
        to at least `SMALL` numbers, since MLX would compile another kernel for fewer.
        """
        if not self._approval.check:
            return []
        specs = {layer: group.spec for group in groups for layer in group.layers}
        checks: dict[object, KernelCheck] = {}
        for layer, call in calls:
            spec = specs[layer]
            variant = make_variant(Variant, call, spec, block_size)
            checks.setdefault(variant, KernelCheck(variant.label, partial(self.methods.is_approved, variant)))
            shape, window = make_variant(PrefillVariant, call, spec, block_size), spec.attention_window
            if self.prefill.is_preferred(shape, window):
                check_key = (shape, chunks_fit_blocks(shape, window))
                checks.setdefault(check_key, KernelCheck(shape.label, partial(self.prefill.is_approved, shape, window)))
        return list(checks.values())

    def used_kernels(self) -> tuple[str, ...]:
        """Return the names of the kernels that have served a layer."""
        names = {method.kernel.value for method in self._selected_methods.values() if isinstance(method, Variant)}
        return tuple(sorted(names | ({"prefill"} if self.prefill.has_served else set())))

    def reconsider(self) -> None:
        """Check every kernel variant again at its next use, because a step failed, perhaps by a kernel."""
        self._selected_methods.clear()
        self.methods.clear_checks()
        self.prefill.reconsider()
        self._approval.reconsider()

    def attend(self, queries: mx.array, kv: PagedKV, params: AttentionParams) -> mx.array:
        """Compute `paged_attention` by the kernels, or by MLX operations where no kernel serves."""
        if kv.replace_queries is not None:
            queries = kv.replace_queries(queries)
        if not kv.step.pieces:
            return self._attend_rows(queries, kv, params)
        shape, reproducible = self._variant_for(PrefillVariant, queries, kv, params), self.methods.choices.reproducible
        prefill = self.prefill.serves(shape, kv.step.attention_window)
        if (
            not prefill
            and not reproducible
            and kv.expand is None
            and (short_rows := kv.derived.get(ShortPieceRows, kv.step))
        ):
            null_block = kv.arena.null_block(kv.arena.group_of[kv.layer])
            as_rows = replace(kv, step=short_rows.step(kv.arena.block_size, null_block), derived=short_rows.derived)
            if isinstance(self._select_method(queries, as_rows, params), Variant):
                reordered_queries = short_rows.reorder_queries(queries)
                parts = [self._attend_rows(reordered_queries, as_rows, params)]
                if as_rows.step.pieces:
                    parts += reference.attend_pieces(reordered_queries, as_rows, params)
                return short_rows.restore_order(parts[0] if len(parts) == 1 else mx.concatenate(parts))
        parts = [self._attend_rows(queries, kv, params)] if kv.step.rows else []
        if prefill:
            factors, per_head = self._score_factors(params), self._per_head_input("sinks", kv.layer, params.sinks)
            of_pieces, rows = queries[kv.step.rows :] if kv.step.rows else queries, kv.step.rows
            parts.append(self.prefill.attend(shape, of_pieces, kv, factors, per_head))
            for piece in kv.step.pieces:
                if piece.bidirectional:  # the kernel shows no later tokens
                    parts[-1][piece.begin - rows : piece.end - rows] = reference.attend_piece(
                        queries, kv, params, piece
                    )
        else:
            parts += reference.attend_pieces(queries, kv, params, one_by_one=reproducible)
        return parts[0] if len(parts) == 1 else mx.concatenate(parts)

    def _attend_rows(self, queries: mx.array, kv: PagedKV, params: AttentionParams) -> mx.array:
        """Return the attention of single-token queries, by what serves the layer. `queries` are the whole step's."""
        method = self._select_method(queries, kv, params)
        if isinstance(method, Variant):
            return self.decode(method, queries, kv, params)
        return method(queries, kv, params)

    def decode(self, variant: Variant, queries: mx.array, kv: PagedKV, params: AttentionParams) -> mx.array:
        """Return the attention of single-token queries by a decode kernel. `queries` are those of the whole step."""
        queries = queries[: kv.step.rows] if kv.step.pieces else queries
        step = kv.derived.get(DecodeKernelStep, kv.step)
        work = step.work_list(kv.tail_tokens, variant.geometry.partition)
        slab = kv.arena.slab(kv.layer)
        if kv.tail_tokens == _CHECKED_TAIL_TOKENS:
            _require_contiguous(kv.layer, slab)
        tail = self._tail_or_placeholder(kv, slab)
        stride = QUANTIZED_PARTS if kv.quantization is not None else 1
        keys, values = _split_kv(slab[::stride])
        tail_keys, tail_values = _split_kv(tail[::stride])
        inputs = DecodeInputs(
            mx.contiguous(queries),  # a view where one projection makes queries, keys and values, and nothing rotates
            keys,
            values,
            tail_keys,
            tail_values,
            step.tables,
            work.plan,
            self._score_factors(params),
            self._per_head_input("sinks", kv.layer, params.sinks),
            self._per_head_input("slopes", kv.layer, params.slopes),
            scales=slab[1::QUANTIZED_PARTS] + tail[1::QUANTIZED_PARTS] if kv.quantization is not None else (),
            biases=slab[2::QUANTIZED_PARTS] + tail[2::QUANTIZED_PARTS] if kv.quantization is not None else (),
        )
        if work.items == kv.step.rows:  # so every row has one partition
            return self._kernels.decode_and_reduce(variant, work.items, inputs)
        return self._kernels(variant, work.items, inputs)

    def _select_method(self, queries: mx.array, kv: PagedKV, params: AttentionParams) -> Variant | Attend:
        """Return the kernel variant or MLX method for this layer's single-token queries, cached per layer shape."""
        key = layer_key(queries, kv, params)
        method = self.methods.choices.method_for(key, kv)
        if (key, method) not in self._selected_methods:
            variant = self._variant_for(Variant, queries, kv, params)
            self._selected_methods[key, method] = self.methods.select(variant, method)
        return self._selected_methods[key, method]

    def _variant_for(
        self, kind: type[KernelVariant], queries: mx.array, kv: PagedKV, params: AttentionParams
    ) -> KernelVariant:
        """Return the kernel variant of class `kind` for this layer."""
        call = AttentionCall.from_arguments(queries, params)
        return make_variant(kind, call, kv.arena.spec(kv.layer), kv.arena.block_size)

    def _tail_or_placeholder(self, kv: PagedKV, slab: Slab) -> Slab:
        """Return the tail, or placeholder arrays for the kernel if there is none."""
        if kv.tail is not None:
            return kv.tail
        return tuple(self._placeholder_tail(a.shape[2], a.dtype) for a in slab)

    def _placeholder_tail(self, dim: int, dtype: mx.Dtype) -> mx.array:
        """Return a zero array that stands for a missing tail, made once per shape."""
        if (dim, dtype) not in self._no_tail:
            columns = -(-SMALL // dim)  # as for `_per_head_input`
            self._no_tail[dim, dtype] = mx.zeros((1, 1, columns, dim), dtype)
        return self._no_tail[dim, dtype]

    def _score_factors(self, params: AttentionParams) -> mx.array:
        """Return scale and softcap as a device array, made once per pair."""
        factors = (params.scale, params.softcap or 0.0)
        if factors not in self._factors:
            self._factors[factors] = mx.array(factors, mx.float32)
        return self._factors[factors]

    def _per_head_input(self, name: str, layer: int, numbers: mx.array | None) -> mx.array:
        """Return a layer's sinks or slopes as padded float32, as the kernels read them; a placeholder for None."""
        if numbers is None:
            return self._nothing_per_head
        cached = self._per_head.get((name, layer))
        if cached is None or cached[0] is not numbers:
            padding = max(0, SMALL - numbers.size)  # a small input would be in another address space: another kernel
            finite = mx.maximum(numbers.astype(mx.float32), -1e37)  # LOWEST: the kernels' exponentials take no infinity
            padded = mx.pad(mx.contiguous(finite), (0, padding))
            self._per_head[name, layer] = cached = (numbers, padded)
        return cached[1]


def _split_kv(arrays: Slab) -> tuple[mx.array, mx.array | None]:
    """Return keys and values of a slab or tail; None for values that are part of the keys."""
    return arrays[0], arrays[1] if len(arrays) > 1 else None


def _require_contiguous(layer: int, slab: Slab) -> None:
    """Raise KVBlockError unless each slab is row-contiguous in memory, as the kernels read it. MLX does not check this,
    and with other strides the answers would be wrong. Slabs from `mx.zeros` and writes in place are contiguous.

    A memoryview holds its array, not more: MLX waits for the array and hands out its pointer (`python/src/buffer.h`,
    0.32). While it exists, a write would copy the slab, so it is released at once, also if an error keeps this frame.
    """
    for index, array in enumerate(slab):
        name = "values" if 2 * index >= len(slab) > 1 else "keys"
        with memoryview(array) as memory:  # type: ignore[arg-type]
            contiguous, strides = memory.c_contiguous, memory.strides
        if not contiguous:
            raise KVBlockError(
                f"layer {layer}'s {name} {array.shape} have strides of {strides} bytes, which the kernels "
                "do not read: this is a fault of the arena, please report it; attention='reference' reads them"
            )


# Prefill on the tiled kernel: which layers it serves, and its inputs, made once per step for all layers.


@dataclass(frozen=True)
class _PrefillWork:
    """A prefill work list on the device."""

    items: int
    plan: mx.array
    tables: mx.array


class PrefillKernelStep:
    """The prefill kernel's work lists of a step, by block size and tile."""

    def __init__(self, step: GroupStep) -> None:
        self._step = step
        self._lists: dict[tuple[int, int], _PrefillWork] = {}

    def work_list(self, block_size: int, tile: int) -> _PrefillWork:
        """Return the work list for tiles of `tile` tokens."""
        if (block_size, tile) not in self._lists:
            work = make_prefill_work_list(self._step.pieces, block_size, self._step.attention_window, tile)
            self._lists[block_size, tile] = _PrefillWork(work.items, mx.array(work.plan), mx.array(work.tables))
        return self._lists[block_size, tile]


PrefillKey = tuple[PrefillVariant, AttentionWindow]
"""What decides which way computes a layer's prefill pieces. All of them take the same: if their length counted, or
where their blocks lie, a request's tokens would depend on the other requests in the batch.
"""


class MetalPrefill:
    """Prefill attention by a kernel of `factory`, for layers where it is faster than MLX's attention and approved."""

    def __init__(self, factory: KernelFactory, approval: KernelApproval, *, matrix_units: bool) -> None:
        self._kernel = PrefillKernel(factory)
        self._approval = approval
        self._matrix_units = matrix_units
        self._approvals: dict[tuple[PrefillVariant, bool], bool] = {}
        self.choices: dict[PrefillKey, bool] = {}
        """Whether the kernel serves, where that was timed. Elsewhere rules decide."""

    @property
    def has_served(self) -> bool:
        """Whether the kernel has served a layer."""
        return any(self._approvals.values())

    def reconsider(self) -> None:
        """Ask for approval of every variant again at its next use."""
        self._approvals.clear()

    @contextmanager
    def choose_temporarily(self, key: PrefillKey, by_kernel: bool) -> Iterator[None]:
        """Context: have the kernel (`by_kernel`) or MLX compute layers of this `key`. They do not count as served."""
        choices, approvals = self.choices, self._approvals
        self.choices, self._approvals = {**choices, key: by_kernel}, dict(approvals)
        try:
            yield
        finally:
            self.choices, self._approvals = choices, approvals

    def serves(self, variant: PrefillVariant, attention_window: AttentionWindow) -> bool:
        """Return whether the prefill kernel, not MLX's attention, computes a layer: it is preferred and approved."""
        if not self.is_preferred(variant, attention_window):
            return False
        fits_blocks = chunks_fit_blocks(variant, attention_window)
        if (variant, fits_blocks) not in self._approvals:
            self._approvals[variant, fits_blocks] = self.is_approved(variant, attention_window)
        return self._approvals[variant, fits_blocks]

    def is_preferred(self, variant: PrefillVariant, attention_window: AttentionWindow) -> bool:
        """Return whether the prefill kernel is preferred to MLX's attention for a layer, by timing or else by rules."""
        choice = self.choices.get((variant, attention_window))
        return self.is_preferred_by_rules(variant, attention_window) if choice is None else choice

    def is_preferred_by_rules(self, variant: PrefillVariant, attention_window: AttentionWindow) -> bool:
        """Return whether the rules, which decide where nothing was timed, prefer the prefill kernel for a layer."""
        return reason_for_our_kernel(variant, attention_window, matrix_units=self._matrix_units) is not None

    def is_approved(self, variant: PrefillVariant, attention_window: AttentionWindow) -> bool:
        """Return whether rules and check allow a layer the prefill kernel. Threads may ask for different variants."""
        reason = refusal(variant)
        if not chunks_fit_blocks(variant, attention_window):
            reason = f"chunks of {attention_window.tokens} tokens are not of whole blocks"
        return self._approval.is_approved(variant, reason, lambda: check_prefill(self._kernel, variant))

    def attend(
        self, variant: PrefillVariant, queries: mx.array, kv: PagedKV, factors: mx.array, sinks: mx.array
    ) -> mx.array:
        """Return the attention of all prefill pieces, `[tokens, query_heads, 1, value_dim]`; `queries` are the pieces'
        alone. `factors` and `sinks` are as in DecodeInputs.
        """
        work = kv.derived.get(PrefillKernelStep, kv.step).work_list(variant.block_size, variant.tile)
        keys, values = kv.arena.slab(kv.layer)
        inputs = PrefillInputs(mx.contiguous(queries), keys, values, work.tables, work.plan, factors, sinks)
        return self._kernel(variant, work.items, inputs)


def chunks_fit_blocks(variant: PrefillVariant, attention_window: AttentionWindow) -> bool:
    """Return whether the chunks of a chunked attention window consist of whole blocks; True without chunks."""
    return not attention_window.chunked or (attention_window.tokens or 0) % variant.block_size == 0


# The shortest pieces of a step as rows of one token each, for the decode kernels.
#
# A row that verifies a few drafts is such a piece. As rows, all of them and the decoding rows are one launch, which
# cuts a row into partitions, reads any blocks and knows every window and option. Each token gets the bits that it would
# get if it were decoded alone. The price: the keys and values of a row are read once for each of its tokens.


MAX_TOKENS_AS_ROWS = 4
"""The most tokens of a piece that become rows. Tiles of a prefill kernel have 8 queries or more, and would be half
empty. More rows would read more than what they save.
"""


class ShortPieceRows:
    """A step whose short prefill pieces (up to `MAX_TOKENS_AS_ROWS` tokens) become one-token rows for decoding."""

    def __init__(self, step: GroupStep) -> None:
        self._original_step = step
        is_long = [piece.bidirectional or piece.end - piece.begin > MAX_TOKENS_AS_ROWS for piece in step.pieces]
        self._short_pieces = [piece for piece, long in zip(step.pieces, is_long, strict=True) if not long]
        self._long_pieces = [piece for piece, long in zip(step.pieces, is_long, strict=True) if long]
        self._step: GroupStep | None = None
        self._order: mx.array | None = None
        self._inverse_order: mx.array | None = None
        self.derived = StepDerivedData()
        flat = [np.arange(piece.begin, piece.end) for piece in (*self._short_pieces, *self._long_pieces)]
        order = np.concatenate([np.arange(step.rows), *flat]).astype(np.int32)
        if (np.diff(order) != 1).any():
            self._order, self._inverse_order = mx.array(order), mx.array(np.argsort(order).astype(np.int32))

    def __bool__(self) -> bool:
        """Whether there are short pieces."""
        return bool(self._short_pieces)

    def step(self, block_size: int, null_block: int) -> GroupStep:
        """Return the step with these rows. Its queries must be in the order that `reorder_queries` returns."""
        if self._step is None:
            self._step = self._make_step(block_size, null_block)
        return self._step

    def reorder_queries(self, queries: mx.array) -> mx.array:
        """Bring the original step's queries into the order of the step that `step` returns."""
        return queries if self._order is None else queries[self._order]

    def restore_order(self, output: mx.array) -> mx.array:
        """Bring the results of the step that `step` returns into the order of the original step."""
        return output if self._inverse_order is None else output[self._inverse_order]

    def _make_step(self, block_size: int, null_block: int) -> GroupStep:
        """Return the step with a row for each token of the short pieces."""
        original = self._original_step
        counts = [piece.end - piece.begin for piece in self._short_pieces]
        blocks = [piece.blocks(block_size) for piece in self._short_pieces]
        width = max(original.tables.shape[1], *map(len, blocks))
        tables = np.full((original.rows + sum(counts), width), null_block, np.int32)
        tables[: original.rows, : original.tables.shape[1]] = original.tables
        next_row = original.rows
        for count, piece_blocks in zip(counts, blocks, strict=True):
            tables[next_row : next_row + count, : len(piece_blocks)] = piece_blocks
            next_row += count
        lengths = [np.arange(piece.first + 1, piece.tokens + 1) for piece in self._short_pieces]
        long_pieces: list[PrefillPiece] = []
        for piece in self._long_pieces:
            long_pieces.append(replace(piece, begin=next_row, end=next_row + piece.end - piece.begin))
            next_row = long_pieces[-1].end
        return replace(
            original,
            tables=tables,
            lengths=np.concatenate([original.lengths, *lengths]).astype(np.int32),
            runs=(*original.runs, *[None] * sum(counts)),
            pieces=tuple(long_pieces),
        )
