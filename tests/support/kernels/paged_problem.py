"""Problems for the decode kernels and their answers in float64: what the rows hold, laid out in an arena and a tail.

Whatever must not be read is poison: dead slots and columns are NaN or infinite, and block table entries that no live
token needs name blocks that do not exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np

from cortexmlx.kv.spec import AttentionWindow
from cortexmlx.metal.kernels import DecodeInputs, DecodeKernels
from cortexmlx.metal.lab import sim
from cortexmlx.metal.rules import Variant
from cortexmlx.metal.work import make_work_list, pad_tables

NO_BLOCK = 1 << 24
COLUMNS = 20
TOLERANCE = {"float32": 5e-6, "float16": 1.2e-3, "bfloat16": 1e-2}
"""Of results of order 1; half precision rounds only the result, whose last digit is 2 ** -11 or 2 ** -8 of it."""

_FAST = 4e-5
GPU_TOLERANCE = {dtype: tolerance + _FAST for dtype, tolerance in TOLERANCE.items()}
"""The same on a GPU, where sums have another order and `fast::exp` is good to 3 + 2 |x| units in the last place. So a
weight that matters (x above -16: 1e-7 of the largest) is off by 35 units, 4e-6 of it, and a mean of values up to 5 by
at most twice that share of them. A product in TF32 would be off by 1e-3."""


def variant(group: int = 2, dim: int = 16, block_size: int = 8, dtype: str = "float32", **changes: Any) -> Variant:
    """A small variant; `changes` set further fields."""
    return replace(Variant(dtype, dtype, dim, dim, block_size, group), **changes)


WIDE = {
    "latent": Variant("float32", "float32", 64, 32, 8, 11, latent=True),  # two tiles, the second not full
    "apart": Variant("float32", "float16", 288, 32, 8, 3),  # a lane's numbers of a key come 8 and 2 at a time
}
"""A small variant of the wide kernel of either kind."""


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """The nearest numbers of `dtype`, as float32."""
    return np.array(to_mlx(values, dtype).astype(mx.float32))


def to_mlx(values: np.ndarray, dtype: str) -> mx.array:
    return mx.array(values.astype(np.float32)).astype(getattr(mx, dtype))


@dataclass(frozen=True)
class Row:
    """What one sequence holds: query `[query_heads, key_dim]`, keys and values `[kv_heads, tokens, dim]`, float32."""

    query: np.ndarray
    keys: np.ndarray
    values: np.ndarray

    @property
    def tokens(self) -> int:
        return self.keys.shape[1]


def random_rows(v: Variant, tokens: Sequence[int], kv_heads: int = 2, seed: int = 0, size: float = 1.0) -> list[Row]:
    """Rows of so many tokens; the numbers of queries and keys are of order `size`."""
    random = np.random.default_rng(seed)

    def draw(dtype: str, scale: float, *shape: int) -> np.ndarray:
        return rounded(scale * random.standard_normal(shape), dtype)

    def row(n: int) -> Row:
        query, keys = draw(v.dtype, size, kv_heads * v.group, v.key_dim), draw(v.kv_dtype, size, kv_heads, n, v.key_dim)
        return Row(
            query, keys, keys[..., : v.value_dim] if v.latent else draw(v.kv_dtype, 1.0, kv_heads, n, v.value_dim)
        )

    return [row(n) for n in tokens]


@dataclass(frozen=True)
class Options:
    """The rest of a problem. `sinks` and `slopes` `[query_heads]`; `scale` None is 1 / sqrt(key_dim)."""

    window: int | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: np.ndarray | None = None
    slopes: np.ndarray | None = None


NONE = Options()


def answer(v: Variant, rows: Sequence[Row], options: Options = NONE) -> np.ndarray:
    """Attention in float64, `[rows, query_heads, value_dim]`."""
    out = np.zeros((len(rows), rows[0].query.shape[0], v.value_dim))
    for r, row in enumerate(rows):
        first = 0 if options.window is None else max(0, row.tokens - options.window)
        for head in range(row.query.shape[0]):
            keys = row.keys[head // v.group, first:].astype(np.float64)
            scores = keys @ row.query[head].astype(np.float64) * (options.scale or v.key_dim**-0.5)
            if options.softcap is not None:
                scores = options.softcap * np.tanh(scores / options.softcap)
            if options.slopes is not None:
                scores = scores + float(options.slopes[head]) * (np.arange(first, row.tokens) - (row.tokens - 1))
            sink = -np.inf if options.sinks is None else float(options.sinks[head])
            top = max(scores.max(initial=-np.inf), sink)
            weights = np.exp(scores - top) if scores.size else scores
            total = weights.sum() + (np.exp(sink - top) if np.isfinite(sink) else 0.0)
            if total > 0:
                out[r, head] = weights @ row.values[head // v.group, first:].astype(np.float64) / total
    return out


@dataclass(frozen=True)
class Layout:
    """Rows laid out: slabs `[kv_heads, slots, dim]`, tails `[rows, kv_heads, COLUMNS, dim]`, tables, arena lengths."""

    keys: np.ndarray
    values: np.ndarray
    tail_keys: np.ndarray
    tail_values: np.ndarray
    tables: np.ndarray
    arena_tokens: np.ndarray
    tail_tokens: int


def lay_out(
    v: Variant, rows: Sequence[Row], tail_tokens: int = 0, window: int | None = None, seed: int = 0, shared: int = 0
) -> Layout:
    """Scatter the rows over an arena, their last `tail_tokens` tokens in the tail.

    The first `shared` blocks of all rows are the same ones: their contents must be equal.
    """
    random = np.random.default_rng(seed)
    size, kv_heads = v.block_size, rows[0].keys.shape[0]
    lengths = np.array([row.tokens - tail_tokens for row in rows], np.int32)
    assert (lengths >= 0).all()
    counts = -(-lengths // size)
    blocks = int(counts.sum()) + 2
    free = list(random.permutation(blocks))
    tables = np.full((len(rows), max(1, int(counts.max()))), NO_BLOCK, np.int32)
    keys = np.full((kv_heads, blocks * size, v.key_dim), np.nan, np.float32)
    values = np.full((kv_heads, blocks * size, v.value_dim), np.inf, np.float32)
    tail_keys = np.full((len(rows), kv_heads, COLUMNS, v.key_dim), np.nan, np.float32)
    tail_values = np.full((len(rows), kv_heads, COLUMNS, v.value_dim), -np.inf, np.float32)
    for r, row in enumerate(rows):
        first = 0 if window is None else max(0, row.tokens - window)
        for b in range(first // size, counts[r]):
            tables[r, b] = tables[0, b] if r and b < shared else free.pop()
        position = np.arange(first, lengths[r])
        slots = tables[r, position // size] * size + position % size
        keys[:, slots], values[:, slots] = row.keys[:, position], row.values[:, position]
        live = np.arange(max(first, lengths[r]), row.tokens)
        tail_keys[r][:, live - lengths[r]] = row.keys[:, live]
        tail_values[r][:, live - lengths[r]] = row.values[:, live]
    return Layout(keys, values, tail_keys, tail_values, tables, lengths, tail_tokens)


def attend(
    kernels: DecodeKernels, v: Variant, rows: Sequence[Row], options: Options = NONE, **places: Any
) -> np.ndarray:
    """The kernels' result, `[rows, query_heads, value_dim]` float32; of `queries` that are given, for each of their
    tokens: `[rows, query_heads, query_tokens, value_dim]`. `places` as in `problem`.
    """
    result = np.array(kernels(*problem(v, rows, options, **places)).astype(mx.float32))
    return result if "queries" in places else result[:, :, 0]


def problem(
    v: Variant,
    rows: Sequence[Row],
    options: Options = NONE,
    *,
    layout: Layout | None = None,
    arena: tuple[Any, Any] | None = None,
    queries: np.ndarray | None = None,
    later: int = 0,
    **places: Any,
) -> tuple[Variant, int, DecodeInputs]:
    """What the kernels are called with: variant, items and inputs. `places` as in `lay_out`; `arena` replaces the
    slabs, and `queries` `[rows, query_heads, query_tokens, key_dim]` those of the rows, which see no more if they are
    `later` than their rows' ends.
    """
    seen = options.window and options.window + v.query_tokens - 1
    at = layout or lay_out(v, rows, window=seen, **places)
    keys, values = arena or (to_mlx(at.keys, v.kv_dtype), to_mlx(at.values, v.kv_dtype))
    work = make_work_list(
        at.arena_tokens, at.tail_tokens, AttentionWindow(options.window), v.geometry.partition, v.query_tokens
    )
    work.plan[3 : 4 * work.rows : 4] += later
    inputs = DecodeInputs(
        to_mlx(np.stack([row.query for row in rows])[:, :, None] if queries is None else queries, v.dtype),
        keys,
        None if v.latent else values,
        to_mlx(at.tail_keys, v.kv_dtype),
        None if v.latent else to_mlx(at.tail_values, v.kv_dtype),
        mx.array(pad_tables(at.tables)),
        mx.array(work.plan),
        mx.array([options.scale or v.key_dim**-0.5, options.softcap or 0.0], mx.float32),
        _per_head(options.sinks),
        _per_head(options.slopes),
    )
    given = {name: getattr(options, name) is not None for name in ("softcap", "sinks")}
    configured = replace(v, **given, alibi=options.slopes is not None)
    return configured, work.items, inputs


def _per_head(numbers: np.ndarray | None) -> mx.array:
    """As many as the kernels want; what is behind the heads', poison."""
    given = np.zeros(0) if numbers is None else numbers
    return mx.array(np.pad(given, (0, max(0, 8 - len(given))), constant_values=np.nan).astype(np.float32))


def error(got: np.ndarray, wanted: np.ndarray) -> float:
    """The largest difference; infinite if anything is not a number."""
    difference = np.abs(got - wanted).max()
    return float("inf") if np.isnan(difference) else float(difference)


def several_queries(v: Variant, tokens: Sequence[int]) -> tuple[list[Row], np.ndarray]:
    """Rows, and queries `[rows, query_heads, query_tokens, key_dim]` of their newest tokens."""
    rows = random_rows(v, tokens)
    shape = (len(rows), rows[0].query.shape[0], v.query_tokens, v.key_dim)
    return rows, rounded(np.random.default_rng(1).standard_normal(shape), v.dtype)


def answers(v: Variant, rows: Sequence[Row], queries: np.ndarray, options: Options = NONE) -> np.ndarray:
    """What each query token should see, `[rows, query_heads, query_tokens, value_dim]`."""
    each = []
    for token in range(v.query_tokens):
        newer = v.query_tokens - 1 - token
        before = [
            Row(queries[r, :, token], row.keys[:, : row.tokens - newer], row.values[:, : row.tokens - newer])
            for r, row in enumerate(rows)
        ]
        each.append(answer(v, before, options))
    return np.stack(each, axis=2)


def far_slabs(v: Variant, row: Row) -> tuple[Layout, tuple[sim.SparseArray, sim.SparseArray]]:
    """A row in slabs of 4.8 thousand million numbers per head, all zero but for the row's blocks at their ends: the
    layout and the slabs that `attend` takes.
    """
    slots = 4_800_000_000 // v.key_dim // v.block_size * v.block_size
    keys = sim.SparseArray((2, slots, v.key_dim), mx.float16)
    values = sim.SparseArray((2, slots, v.value_dim), mx.float16)
    last = slots // v.block_size
    table = np.array([[last - 1, last - 3, last - 2]], np.int32)
    for b, block in enumerate(table[0]):
        part = slice(b * v.block_size, min((b + 1) * v.block_size, row.tokens))
        for h in range(2):
            keys.put((h, int(block) * v.block_size, 0), mx.array(row.keys[h, part]))
            if not v.latent:
                values.put((h, int(block) * v.block_size, 0), mx.array(row.values[h, part]))
    return replace(lay_out(v, [row]), tables=table), (keys, values)
