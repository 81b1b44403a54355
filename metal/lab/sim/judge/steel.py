"""MLX's tiled attention (`steel_attention`): simdgroup matrices, threadgroup tiles, masks by function constants."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import mlx.core as mx
import numpy as np

from cortexmlx.metal.lab.sim.host import HostKernel, Output
from cortexmlx.metal.lab.sim.judge.cases import TOLERANCE, Case, Floats
from cortexmlx.metal.lab.sim.judge.reference import METAL_NAMES, AttentionProblem, from_bits, rounded

HEADERS = ("steel/attn/kernels/steel_attention.h",)

PARAMS = np.dtype(
    [
        *((name, np.int32) for name in ("B", "H", "D", "qL", "kL", "gqa_factor")),
        ("scale", np.float32),
        *((name, np.int32) for name in ("NQ", "NK", "NQ_aligned", "NK_aligned", "qL_rem", "kL_rem", "qL_off")),
        *((name, np.int64, 3) for name in ("Q_strides", "K_strides", "V_strides", "O_strides")),
    ],
    align=True,
)
MASK_PARAMS = np.dtype([("M_strides", np.int64, 3)], align=True)


@dataclass(frozen=True)
class Tiling:
    """The tiles of a threadgroup: head dim, query rows, key rows, and the grid of simdgroups."""

    head_dim: int
    query_rows: int
    key_rows: int
    rows_of_simdgroups: int
    columns_of_simdgroups: int


def _strides(shape: tuple[int, ...]) -> list[int]:
    return [shape[1] * shape[2] * shape[3], shape[2] * shape[3], shape[3]]


def _attend(t: Tiling, dtype: mx.Dtype, kind: str, length: int, total: int) -> tuple[Floats, Floats]:
    heads, kv_heads, d = 4, 2, t.head_dim
    rng = np.random.default_rng(d + length)
    q_bits, q = rounded(rng.standard_normal((1, heads, length, d)), dtype)
    k_bits, k = rounded(rng.standard_normal((1, kv_heads, total, d)), dtype)
    v_bits, v = rounded(rng.standard_normal((1, kv_heads, total, d)), dtype)
    sinks_bits, sinks = rounded(rng.standard_normal(heads), dtype)
    additive_bits, additive = rounded(rng.standard_normal((length, total)), dtype)
    allowed = rng.random((length, total)) < 0.7
    allowed[:, 0] = True
    params = np.zeros(1, dtype=PARAMS)
    values = {
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
        "Q_strides": _strides(q.shape),
        "K_strides": _strides(k.shape),
        "V_strides": _strides(v.shape),
        "O_strides": _strides(q.shape),
    }
    for name, value in values.items():
        params[name] = value
    mask_params = np.zeros(1, dtype=MASK_PARAMS)
    mask_params["M_strides"] = [0, 0, total]
    masked = kind in ("bool", "additive")
    name = METAL_NAMES[dtype]
    kernel = HostKernel(
        HEADERS,
        "attention",
        f"{name}, {t.query_rows}, {t.key_rows}, {d}, {d}, {t.rows_of_simdgroups}, {t.columns_of_simdgroups}, "
        f"{'bool' if kind == 'bool' else name}, float",
        {
            "align_Q": length % t.query_rows == 0,
            "align_K": total % t.key_rows == 0,
            "has_mask": masked,
            "do_causal": kind == "causal",
            "has_sinks": kind == "sinks",
        },
    )
    done = kernel(
        {
            0: q_bits,
            1: k_bits,
            2: v_bits,
            3: Output(q_bits.nbytes, q_bits.itemsize),
            4: params.view(np.uint8),
            5: mask_params.view(np.uint8),
            6: allowed if kind == "bool" else additive_bits,
            7: sinks_bits,
        },
        (int(values["NQ"]), heads, 1),
        (32, t.rows_of_simdgroups, t.columns_of_simdgroups),
    )
    mask = {"bool": allowed, "additive": additive}.get(kind)
    problem = AttentionProblem(q, k, v, d**-0.5, kind == "causal", mask, sinks if kind == "sinks" else None)
    return from_bits(done.outputs[0], q.shape, dtype), problem.solve()


def cases() -> Iterator[Case]:
    """Aligned and ragged sizes, every mask, and one and two simdgroups along the head dimension."""
    tilings = (Tiling(64, 32, 32, 4, 1), Tiling(80, 32, 32, 4, 1), Tiling(128, 32, 16, 4, 1), Tiling(128, 32, 32, 4, 2))
    for t in tilings:
        for dtype, name in METAL_NAMES.items():
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
                yield Case("MLX", title, partial(_attend, t, dtype, kind, length, total), TOLERANCE[dtype])
