"""MLX's attention kernels: the vector kernels of one pass and two; those for eight query heads per KV head, which load
each key once; the helpers of the blocked path; and tiled attention (`steel_attention`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from cortexmlx.metal.lab.judge.cases import TOLERANCE, Defect, KernelCase, ResultAndExpected
from cortexmlx.metal.lab.judge.launches import (
    F32,
    NAMES,
    Array,
    AttentionProblem,
    contiguous_arguments,
    draw,
    f32,
    i32,
    i64,
    launch,
    round_to,
)
from cortexmlx.metal.lab.sim.host import ResultArray
from cortexmlx.metal.lab.sim.report import Fault

MASKS = ("none", "causal", "bool", "additive", "sinks")


class _AttentionInputs:
    """Random q, k, v with one kind of mask: bits for the kernel, float64 for the reference."""

    def __init__(
        self, head_dim: int, dtype: mx.Dtype, kind: str, heads: int, kv_heads: int, length: int, total: int
    ) -> None:
        rng = np.random.default_rng(head_dim * 7 + length)

        def draw(*shape: int) -> tuple[Array, npt.NDArray[np.float64]]:
            return round_to(rng.standard_normal(shape), dtype)

        self.q, q = draw(1, heads, length, head_dim)
        self.k, k = draw(1, kv_heads, total, head_dim)
        self.v, v = draw(1, kv_heads, total, head_dim)
        self.sinks, sinks = draw(heads)
        self.additive, additive = draw(length, total)
        self.allowed = rng.random((length, total)) < 0.7
        self.allowed[:, 0] = True
        mask = {"bool": self.allowed, "additive": additive}.get(kind)
        self.problem = AttentionProblem(
            q, k, v, head_dim**-0.5, kind == "causal", mask, sinks if kind == "sinks" else None
        )
        self.constants = {
            "has_mask": kind in ("bool", "additive"),
            "bool_mask": kind == "bool",
            "float_mask": kind == "additive",
            "do_causal": kind == "causal",
            "has_sinks": kind == "sinks",
        }

    @property
    def masks(self) -> list[Array]:
        """The kernel's mask arguments: both kinds of mask, strides by column, row and head, and the sinks."""
        return [self.allowed, self.additive, i32(1), i32(self.allowed.shape[1]), i32(0), self.sinks]


def _run_sdpa_vector(head_dim: int, dtype: mx.Dtype, kind: str) -> ResultAndExpected:
    heads, kv_heads, length, total = 4, 2, 2, 77
    x = _AttentionInputs(head_dim, dtype, kind, heads, kv_heads, length, total)
    (y,) = launch(
        "sdpa_vector.h",
        "sdpa_vector",
        f"{NAMES[dtype]}, {head_dim}",
        {
            0: x.q,
            1: x.k,
            2: x.v,
            3: ResultArray(x.q.shape, dtype),
            4: i32(heads // kv_heads),
            **dict(enumerate(contiguous_arguments(x.k, head_dim**-0.5), start=5)),
            **dict(enumerate(x.masks, start=11)),
            17: i32(heads),
        },
        groups=(heads, length, 1),
        threadgroup=(1024, 1, 1),
        constants=x.constants,
    )
    return y, x.problem.solve()


def _run_sdpa_vector_2pass(head_dim: int, dtype: mx.Dtype, kind: str) -> ResultAndExpected:
    heads, kv_heads, length, total, blocks = 4, 2, 2, 133, 32
    x = _AttentionInputs(head_dim, dtype, kind, heads, kv_heads, length, total)
    rows, template = heads * length, f"{NAMES[dtype]}, {head_dim}"
    values, sums, largest = launch(
        "sdpa_vector.h",
        "sdpa_vector_2pass_1",
        template,
        {
            0: x.q,
            1: x.k,
            2: x.v,
            3: ResultArray((rows, blocks, head_dim), dtype),
            4: ResultArray((rows, blocks), F32),
            5: ResultArray((rows, blocks), F32),
            **dict(enumerate(contiguous_arguments(x.k, head_dim**-0.5), start=7)),
            **dict(enumerate(x.masks, start=13)),
        },
        groups=(kv_heads, 1, blocks),
        threadgroup=(32, heads // kv_heads, length),
        constants={**x.constants, "blocks": blocks},
    )
    (y,) = launch(
        "sdpa_vector.h",
        "sdpa_vector_2pass_2",
        template,
        {
            0: round_to(values, dtype)[0],
            1: sums.astype(np.float32),
            2: largest.astype(np.float32),
            3: ResultArray(x.q.shape, dtype),
            4: i32(blocks),
        },
        groups=(heads, length, 1),
        threadgroup=(1024, 1, 1),
    )
    return y, x.problem.solve()


def sdpa_cases() -> Iterator[KernelCase]:
    """Yield the cases of `sdpa_vector`: head dims 64, 96, 128 and 256; float, half and bfloat; every mask."""
    for title, run in (("sdpa_vector", _run_sdpa_vector), ("sdpa_vector_2pass", _run_sdpa_vector_2pass)):
        for head_dim in (64, 96, 128, 256):
            for dtype, name in NAMES.items():
                for kind in MASKS:
                    title_of_case = f"{title} {name} {head_dim} mask {kind}"
                    yield KernelCase("MLX", title_of_case, partial(run, head_dim, dtype, kind), TOLERANCE[dtype])


# Eight query heads per KV head, and the helpers of the blocked path.


def _run_grouped(
    dtype: mx.Dtype, head_dim: int, total: int, blocks: int, heads_per_simdgroup: int
) -> ResultAndExpected:
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
            3: ResultArray((rows, blocks, head_dim), dtype),
            4: ResultArray((rows, blocks), F32),
            5: ResultArray((rows, blocks), F32),
            **dict(enumerate(contiguous_arguments(k_bits, head_dim**-0.5), start=7)),
        },
        groups=(kv_heads, batch, blocks),
        threadgroup=(32, group, 1),
    )
    out, sums, largest = partials
    weights = sums * np.exp(largest - largest.max(-1, keepdims=True))
    y = (out * np.exp(largest - largest.max(-1, keepdims=True))[..., None]).sum(1) / weights.sum(-1, keepdims=True)
    return y.reshape(q.shape), AttentionProblem(q, k, v, head_dim**-0.5).solve()


def _run_scale_copy(dtype: mx.Dtype) -> ResultAndExpected:
    batch, heads, length, head_dim, rows, offset, scale = 2, 3, 9, 40, 4, 3, 0.5
    bits, q = draw(4, (batch, heads, length, head_dim), dtype)
    (y,) = launch(
        "sdpa_blocked.h",
        "sdpa_blocked_scale_copy",
        NAMES[dtype],
        {
            0: bits,
            1: ResultArray((batch, heads, rows, head_dim), dtype),
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


def _run_causal_mask(dtype: mx.Dtype) -> ResultAndExpected:
    tile, columns, heads = 8, 21, 3
    bits, scores = draw(5, (heads * tile, columns), dtype)
    (y,) = launch(
        "sdpa_blocked.h",
        "sdpa_blocked_causal_mask",
        NAMES[dtype],
        {0: ResultArray(scores.shape, dtype, bits), 1: i32(tile), 2: i32(columns)},
        threads=(tile, heads * tile, 1),
        threadgroup=(8, 8, 1),
    )
    later = np.arange(columns)[None] > np.arange(heads * tile)[:, None] % tile + columns - tile
    hidden = y < -6e4
    return np.where(hidden, 0.0, y) + hidden * 100.0, np.where(later, 100.0, scores)


def grouped_cases() -> Iterator[KernelCase]:
    """Yield the cases of eight query heads per KV head, some with short and empty chunks, and the helpers."""
    for dtype, name in NAMES.items():
        tolerance = TOLERANCE[dtype]
        for head_dim, total, blocks, per_simdgroup in (
            (64, 133, 32, 8),
            (128, 133, 32, 4),
            (64, 40, 32, 8),
            (128, 300, 4, 4),
        ):
            run = partial(_run_grouped, dtype, head_dim, total, blocks, per_simdgroup)
            yield KernelCase("MLX", f"sdpa_vector_2pass_1_gqa {name} {head_dim} {total} in {blocks}", run, tolerance)
        yield KernelCase("MLX", f"sdpa_blocked_scale_copy {name}", partial(_run_scale_copy, dtype), 0.0)
        yield KernelCase("MLX", f"sdpa_blocked_causal_mask {name}", partial(_run_causal_mask, dtype), 0.0)


# Tiled attention: simdgroup matrices, threadgroup tiles, masks by function constants.

_STEEL_PARAMS = np.dtype(
    [
        *((name, np.int32) for name in ("B", "H", "D", "qL", "kL", "gqa_factor")),
        ("scale", np.float32),
        *((name, np.int32) for name in ("NQ", "NK", "NQ_aligned", "NK_aligned", "qL_rem", "kL_rem", "qL_off")),
        *((name, np.int64, 3) for name in ("Q_strides", "K_strides", "V_strides", "O_strides")),
    ],
    align=True,
)
_STEEL_MASK_PARAMS = np.dtype([("M_strides", np.int64, 3)], align=True)


@dataclass(frozen=True)
class Tiling:
    """The tiles of a threadgroup: head dim, query rows, key rows, and the grid of simdgroups."""

    head_dim: int
    query_rows: int
    key_rows: int
    rows_of_simdgroups: int
    columns_of_simdgroups: int


_FLOATS_IN_HALVES = Defect(
    Fault.MISALIGNED,
    "MLX's steel_attention with two columns of SIMD groups writes floats into an array of halves, which the language "
    "aligns to two bytes, and Apple's compiler to more",
)


def _run_steel(t: Tiling, dtype: mx.Dtype, kind: str, length: int, total: int) -> ResultAndExpected:
    """Run `steel_attention`: the queries are the last tokens of the keys."""
    heads, kv_heads, d = 4, 2, t.head_dim
    x = _AttentionInputs(d, dtype, kind, heads, kv_heads, length, total)
    params, mask_params = np.zeros(1, dtype=_STEEL_PARAMS), np.zeros(1, dtype=_STEEL_MASK_PARAMS)
    values: dict[str, float | list[int]] = {
        "B": 1,
        "H": heads,
        "D": d,
        "qL": length,
        "kL": total,
        "gqa_factor": heads // kv_heads,
        "scale": d**-0.5,
        "NQ": -(-length // t.query_rows),
        "NK": -(-total // t.key_rows),
        "NQ_aligned": length // t.query_rows,
        "NK_aligned": total // t.key_rows,
        "qL_rem": length % t.query_rows,
        "kL_rem": total % t.key_rows,
        "qL_off": total - length,
        **{f"{array}_strides": [heads * length * d, length * d, d] for array in "QO"},
        **{f"{array}_strides": [kv_heads * total * d, total * d, d] for array in "KV"},
    }
    for field, value in values.items():
        params[field] = value
    mask_params["M_strides"] = [0, 0, total]
    name, simdgroups = NAMES[dtype], (t.rows_of_simdgroups, t.columns_of_simdgroups)
    mask, mask_name = (x.allowed, "bool") if kind == "bool" else (x.additive, name)
    inputs = (params.view(np.uint8), mask_params.view(np.uint8), mask, x.sinks)
    (y,) = launch(
        "steel/attn/kernels/steel_attention.h",
        "attention",
        f"{name}, {t.query_rows}, {t.key_rows}, {d}, {d}, {simdgroups[0]}, {simdgroups[1]}, {mask_name}, float",
        {0: x.q, 1: x.k, 2: x.v, 3: ResultArray(x.q.shape, dtype), **dict(enumerate(inputs, start=4))},
        groups=(-(-length // t.query_rows), heads, 1),
        threadgroup=(32, *simdgroups),
        constants={
            "align_Q": length % t.query_rows == 0,
            "align_K": total % t.key_rows == 0,
            **{name: x.constants[name] for name in ("has_mask", "do_causal", "has_sinks")},
        },
    )
    return y, x.problem.solve()


def steel_cases() -> Iterator[KernelCase]:
    """Yield the cases of `steel_attention`: aligned and ragged sizes, every mask, one and two columns of simdgroups."""
    tilings = (Tiling(64, 32, 32, 4, 1), Tiling(80, 32, 32, 4, 1), Tiling(128, 32, 16, 4, 1), Tiling(128, 32, 32, 4, 2))
    for t in tilings:
        for dtype, name in NAMES.items():
            if t.columns_of_simdgroups == 2 and dtype == mx.float32:
                continue
            for kind, length, total in (
                ("none", 64, 64),
                ("none", 37, 61),
                ("causal", 37, 61),
                ("bool", 37, 61),
                ("additive", 37, 61),
                ("sinks", 37, 61),
            ):
                simdgroups = f"{t.rows_of_simdgroups}x{t.columns_of_simdgroups}"
                title = f"steel_attention {name} {t.head_dim} ({simdgroups}) {length}x{total} mask {kind}"
                defect = _FLOATS_IN_HALVES if t.columns_of_simdgroups > 1 and dtype.size == 2 else None
                run = partial(_run_steel, t, dtype, kind, length, total)
                yield KernelCase("MLX", title, run, TOLERANCE[dtype], defect)
