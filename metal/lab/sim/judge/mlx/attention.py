"""MLX's decode attention for eight query heads per KV head, which loads each key once; the helpers of its blocked
path.
"""

from collections.abc import Iterator
from functools import partial

import mlx.core as mx
import numpy as np

from cortexmlx.metal.lab.sim.judge.cases import TOLERANCE, Case, Floats
from cortexmlx.metal.lab.sim.judge.mlx.calls import F32, FLOATS, NAMES, Result, contiguous, draw, f32, i32, i64, launch
from cortexmlx.metal.lab.sim.judge.reference import AttentionProblem


def _grouped(
    dtype: mx.Dtype, head_dim: int, total: int, blocks: int, heads_per_simdgroup: int
) -> tuple[Floats, Floats]:
    """Run `sdpa_vector_2pass_1_gqa`. NumPy combines its partial results, as `sdpa_vector_2pass_2` would."""
    group, kv_heads, batch = 8, 2, 2
    heads, name = group * kv_heads, NAMES[dtype]
    q_bits, q = draw(1, (batch, heads, 1, head_dim), dtype)
    k_bits, k = draw(2, (batch, kv_heads, total, head_dim), dtype)
    v_bits, v = draw(3, (batch, kv_heads, total, head_dim), dtype)
    rows = batch * heads
    partials = launch(
        "sdpa_vector.h",
        "sdpa_vector_2pass_1_gqa",
        f"{name}, {head_dim}, {head_dim}, {group}, {heads_per_simdgroup}",
        {
            0: q_bits,
            1: k_bits,
            2: v_bits,
            3: Result((rows, blocks, head_dim), dtype),
            4: Result((rows, blocks), F32),
            5: Result((rows, blocks), F32),
            **dict(enumerate(contiguous(k_bits, head_dim**-0.5), start=7)),
        },
        groups=(kv_heads, batch, blocks),
        threadgroup=(32, group, 1),
    )
    out, sums, largest = partials
    weights = sums * np.exp(largest - largest.max(-1, keepdims=True))
    y = (out * np.exp(largest - largest.max(-1, keepdims=True))[..., None]).sum(1) / weights.sum(-1, keepdims=True)
    return y.reshape(q.shape), AttentionProblem(q, k, v, head_dim**-0.5).solve()


def _scale_copy(dtype: mx.Dtype) -> tuple[Floats, Floats]:
    batch, heads, length, head_dim, rows, offset, scale = 2, 3, 9, 40, 4, 3, 0.5
    bits, q = draw(4, (batch, heads, length, head_dim), dtype)
    (y,) = launch(
        "sdpa_blocked.h",
        "sdpa_blocked_scale_copy",
        NAMES[dtype],
        {
            0: bits,
            1: Result((batch, heads, rows, head_dim), dtype),
            2: f32(scale),
            3: i64(heads * length * head_dim, length * head_dim, head_dim),
            4: i32(heads),
            5: i32(rows),
            6: i32(head_dim),
            7: i32(offset),
        },
        threads=(head_dim, rows, batch * heads),
        threadgroup=(32, 4, 2),
    )
    return y, q[:, :, offset : offset + rows] * scale


def _causal_mask(dtype: mx.Dtype) -> tuple[Floats, Floats]:
    tile, columns, heads = 8, 21, 3
    bits, scores = draw(5, (heads * tile, columns), dtype)
    (y,) = launch(
        "sdpa_blocked.h",
        "sdpa_blocked_causal_mask",
        NAMES[dtype],
        {0: Result(scores.shape, dtype, bits), 1: i32(tile), 2: i32(columns)},
        threads=(tile, heads * tile, 1),
        threadgroup=(8, 8, 1),
    )
    later = np.arange(columns)[None] > np.arange(heads * tile)[:, None] % tile + columns - tile
    hidden = y < -6e4
    return np.where(hidden, 0.0, y) + hidden * 100.0, np.where(later, 100.0, scores)


def cases() -> Iterator[Case]:
    """Yield both head dims that MLX serves, with token counts that leave chunks short and empty."""
    for dtype in FLOATS:
        name, tolerance = NAMES[dtype], TOLERANCE[dtype]
        for head_dim, total, blocks, per_simdgroup in (
            (64, 133, 32, 8),
            (128, 133, 32, 4),
            (64, 40, 32, 8),
            (128, 300, 4, 4),
        ):
            run = partial(_grouped, dtype, head_dim, total, blocks, per_simdgroup)
            yield Case("MLX", f"sdpa_vector_2pass_1_gqa {name} {head_dim} {total} in {blocks}", run, tolerance)
        yield Case("MLX", f"sdpa_blocked_scale_copy {name}", partial(_scale_copy, dtype), 0.0)
        yield Case("MLX", f"sdpa_blocked_causal_mask {name}", partial(_causal_mask, dtype), 0.0)
