"""The decode and reduce kernels as `mx.fast.metal_kernel` objects, and how they are called.

The mathematics is in the .metal files; what stands here is the few lines between MLX's generated signature and them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import mlx.core as mx
import numpy as np

from cortexmlx.metal.rules import REDUCE_SIMDGROUPS, REDUCE_THREADS, Kernel, Variant
from cortexmlx.metal.work import ROW_ITEMS, WORK_ITEM

KernelFactory = Callable[..., Any]
"""`mx.fast.metal_kernel`, or anything that is called as it is and makes what is called as its kernels are."""


def _struct(name: str, fields: np.dtype[np.void]) -> str:
    """A part of the work list as a struct of the kernels."""
    return f"\n  struct {name} {{ int {', '.join(fields.names or ())}; }};"


_WORK_LIST = _struct("RowItems", ROW_ITEMS) + _struct("WorkItem", WORK_ITEM)

DECODE_ENTRY = f"""{_WORK_LIST}
  constexpr int SIMDGROUPS = (GROUP + TILE - 1) / TILE * SLICES;
  threadgroup float outputs[SIMDGROUPS * VALUE_DIM];
  threadgroup float max_scores[SIMDGROUPS * TILE];
  threadgroup float sum_exp_scores[SIMDGROUPS * TILE];
  const int rows = queries_shape[0], kv_heads = arena_keys_shape[0];
  const int kv_head = int(threadgroup_position_in_grid.y), item = int(threadgroup_position_in_grid.z);
  const device WorkItem* items = (const device WorkItem*)((const device RowItems*)decode_plan + rows);
  const device WorkItem& work = items[item];
  const int64_t row = work.row;
  const int64_t slots = arena_keys_shape[1], columns = tail_keys_shape[2];
  const int64_t row_head = row * kv_heads + kv_head, item_head = int64_t(item) * kv_heads + kv_head;
  paged_decode<T, KV, KEY_DIM, VALUE_DIM, BLOCK_SIZE, GROUP, TILE, AHEAD, SLICES, SOFTCAP>(
      queries + row_head * GROUP * KEY_DIM,
      HeadSource<KV, KEY_DIM>{{arena_keys + kv_head * slots * KEY_DIM, tail_keys + row_head * columns * KEY_DIM}},
      HeadSource<KV, VALUE_DIM>{{
          arena_values + kv_head * slots * VALUE_DIM, tail_values + row_head * columns * VALUE_DIM}},
      block_tables + row * block_tables_shape[1],
      work.first, work.last, work.arena_tokens, score_factors[0], score_factors[1],
      (device Partial<VALUE_DIM>*)partials + item_head * GROUP,
      outputs, max_scores, sum_exp_scores, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
"""

MATRIX_ENTRY = f"""{_WORK_LIST}
  constexpr int TILES = (GROUP * TOKENS + 7) / 8, SIMDGROUPS = TILES * SLICES * PARTS;
  constexpr int QUERY_NUMBERS = (KEY_DIM + 31) / 32 * 256;
  threadgroup T shared_queries[TILES * QUERY_NUMBERS];
  threadgroup float outputs[SIMDGROUPS * 8 * 72];
  threadgroup float max_scores[SIMDGROUPS * 8];
  threadgroup float sum_exp_scores[SIMDGROUPS * 8];
  const int rows = queries_shape[0], kv_heads = arena_keys_shape[0];
  const int kv_head = int(threadgroup_position_in_grid.y), item = int(threadgroup_position_in_grid.z);
  const device RowItems* of_rows = (const device RowItems*)decode_plan;
  const device WorkItem& work = ((const device WorkItem*)(of_rows + rows))[item];
  const int64_t row = work.row;
  const int64_t row_head = row * kv_heads + kv_head, item_head = int64_t(item) * kv_heads + kv_head;
  const int64_t first_slot = kv_head * int64_t(arena_keys_shape[1]), first_column = row_head * tail_keys_shape[2];
  const device int* block_table = block_tables + row * block_tables_shape[1];
  paged_matrix<T, KV, KEY_DIM, VALUE_DIM, BLOCK_SIZE, GROUP, TOKENS, SLICES, PARTS, SOFTCAP>(
      queries + row_head * (GROUP * TOKENS * KEY_DIM),
      PagedHeads<KV, KEY_DIM>{{
          arena_keys + first_slot * KEY_DIM, tail_keys + first_column * KEY_DIM, block_table, work.arena_tokens}},
      PagedHeads<KV, VALUE_DIM>{{
          arena_values + first_slot * VALUE_DIM, tail_values + first_column * VALUE_DIM, block_table,
          work.arena_tokens}},
      work.first, work.last, of_rows[row].start, of_rows[row].end, score_factors[0], score_factors[1],
      (device Partial<VALUE_DIM>*)partials + item_head * (GROUP * TOKENS),
      shared_queries, outputs, max_scores, sum_exp_scores, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
"""

REDUCE_ENTRY = f"""{_WORK_LIST}
  threadgroup float outputs[SIMDGROUPS * VALUE_DIM];
  threadgroup float sum_exp_scores[SIMDGROUPS];
  const int query_heads = partials_shape[1];  // times query tokens
  const int head = int(threadgroup_position_in_grid.y), row = int(threadgroup_position_in_grid.z);
  const device RowItems& work = ((const device RowItems*)decode_plan)[row];
  const int64_t item_head = int64_t(work.first_item) * query_heads + head;
  paged_reduce<T, VALUE_DIM, SIMDGROUPS, SINKS>(
      (const device Partial<VALUE_DIM>*)partials + item_head, work.items, query_heads,
      SINKS ? float(head_sinks[head / TOKENS]) : 0.0f, attended + (int64_t(row) * query_heads + head) * VALUE_DIM,
      outputs, sum_exp_scores, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
"""


def kernel_text(name: str) -> str:
    """The text of a kernel source with its own headers in place."""
    folder = files("cortexmlx.metal")
    text = (folder / name).read_text()
    return text.replace('#include "paged_attention.h"', (folder / "paged_attention.h").read_text())


@dataclass(frozen=True)
class DecodeInputs:
    """What a layer's decode reads: queries `[rows, query_heads, query_tokens, key_dim]`, slabs `[kv_heads, slots, dim]`
    and tails `[rows, kv_heads, W, dim]`, and the step's metadata on the device.

    `factors` holds (scale, softcap); `sinks` is `[query_heads]` float32, anything if the variant has none.

    All are row-contiguous: the kernels read the memory of each by its shape. MLX would copy what is not, and say
    nothing: of a slab gigabytes, for every layer of every step. So it is told not to, and whoever fills this in sees
    to it.
    """

    queries: mx.array
    keys: mx.array
    values: mx.array
    tail_keys: mx.array
    tail_values: mx.array
    tables: mx.array
    plan: mx.array
    factors: mx.array
    sinks: mx.array


_DECODE_INPUTS = [
    *("queries", "arena_keys", "arena_values", "tail_keys", "tail_values"),
    *("block_tables", "decode_plan", "score_factors"),
]
DECODE_SOURCES = {
    Kernel.VECTOR: ("paged_decode", DECODE_ENTRY, "paged_decode.metal"),
    Kernel.MATRIX: ("paged_matrix", MATRIX_ENTRY, "paged_matrix.metal"),
}
"""The kernels of a partition: name, entry and file."""


class DecodeKernels:
    """The kernels of a partition and the reduce kernel, made once by `factory`."""

    def __init__(self, factory: KernelFactory) -> None:
        self._decode = {
            kernel: factory(
                name=f"cortex_{name}",
                input_names=_DECODE_INPUTS,
                output_names=["partials"],
                source=entry,
                header=kernel_text(file),
                ensure_row_contiguous=False,
            )
            for kernel, (name, entry, file) in DECODE_SOURCES.items()
        }
        self._reduce = factory(
            name="cortex_paged_reduce",
            input_names=["partials", "decode_plan", "head_sinks"],
            output_names=["attended"],
            source=REDUCE_ENTRY,
            header=kernel_text("paged_reduce.metal"),
            ensure_row_contiguous=False,
        )

    def __call__(self, variant: Variant, items: int, inputs: DecodeInputs) -> mx.array:
        """Attention, `[rows, query_heads, query_tokens, value_dim]` in the dtype of the queries."""
        return self.reduce(variant, self.decode(variant, items, inputs), inputs)

    def decode(
        self, variant: Variant, items: int, inputs: DecodeInputs, *, init_value: float | None = None
    ) -> mx.array:
        """The partial results of all work items, `[items, query_heads * query_tokens, partial_floats]` float32. With
        `init_value` the output is filled with it before the launch, which costs a launch of its own.
        """
        queries, kv_heads = inputs.queries.shape[1] * variant.query_tokens, inputs.keys.shape[0]
        partials: mx.array
        (partials,) = self._decode[variant.kernel](
            inputs=[
                inputs.queries,
                inputs.keys,
                inputs.values,
                inputs.tail_keys,
                inputs.tail_values,
                inputs.tables,
                inputs.plan,
                inputs.factors,
            ],
            template=_templates(variant)[0],
            grid=(variant.threads, kv_heads, items),
            threadgroup=(variant.threads, 1, 1),
            output_shapes=[(items, queries, variant.partial_floats)],
            output_dtypes=[mx.float32],
            init_value=init_value,
        )
        return partials

    def reduce(
        self, variant: Variant, partials: mx.array, inputs: DecodeInputs, *, init_value: float | None = None
    ) -> mx.array:
        """The result from the partial results. `init_value` as in `decode`."""
        rows, query_heads, query_tokens, _ = inputs.queries.shape
        attended: mx.array
        (attended,) = self._reduce(
            inputs=[partials, inputs.plan, inputs.sinks],
            template=_templates(variant)[1],
            grid=(REDUCE_THREADS, query_heads * query_tokens, rows),
            threadgroup=(REDUCE_THREADS, 1, 1),
            output_shapes=[(rows, query_heads, query_tokens, variant.value_dim)],
            output_dtypes=[inputs.queries.dtype],
            init_value=init_value,
        )
        return attended


@cache
def _templates(variant: Variant) -> tuple[list[tuple[str, Any]], list[tuple[str, Any]]]:
    dtype, kv_dtype = getattr(mx, variant.dtype), getattr(mx, variant.kv_dtype)
    decode = [
        ("T", dtype),
        ("KV", kv_dtype),
        ("KEY_DIM", variant.key_dim),
        ("VALUE_DIM", variant.value_dim),
        ("BLOCK_SIZE", variant.block_size),
        ("GROUP", variant.group),
        *(
            [("TILE", variant.tile), ("AHEAD", variant.ahead)]
            if variant.kernel is Kernel.VECTOR
            else [("TOKENS", variant.query_tokens)]
        ),
        ("SLICES", variant.slices),
        *([("PARTS", variant.parts)] if variant.kernel is Kernel.MATRIX else []),
        ("SOFTCAP", variant.softcap),
    ]
    reduce = [
        ("T", dtype),
        ("VALUE_DIM", variant.value_dim),
        ("SIMDGROUPS", REDUCE_SIMDGROUPS),
        ("TOKENS", variant.query_tokens),
        ("SINKS", variant.sinks),
    ]
    return decode, reduce
