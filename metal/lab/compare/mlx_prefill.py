"""MLX's tiled attention, `steel_attention`, in the simulator, on one row of contiguous keys and values.

This module only counts what the kernel does, so its inputs are zeros. `sim/judge` checks its results.
"""

from __future__ import annotations

import numpy as np

from cortexmlx.metal.lab.compare.mlx_decode import Buffer
from cortexmlx.metal.lab.sim.host import HostKernel, Output
from cortexmlx.metal.lab.sim.judge.steel import HEADERS, MASK_PARAMS, PARAMS
from cortexmlx.metal.lab.sim.report import LaunchReport

_NAMES = {"float32": "float", "float16": "half", "bfloat16": "bfloat16_t"}
_ITEM = {"float32": np.uint32, "float16": np.uint16, "bfloat16": np.uint16}
QUERY_ROWS, SIMDGROUPS = 32, 4
"""Queries and simdgroups of a threadgroup, as MLX's host code has them."""


def key_rows(dim: int) -> int:
    """Return the keys of a tile, as MLX's host code sets them."""
    return 32 if dim < 128 else 16


def steel_attention(dtype: str, dim: int, heads: int, first: int, end: int, *, masked: bool = False) -> LaunchReport:
    """Run `steel_attention` for the tokens `first .. end` of a row as queries, over its tokens `0 .. end`.

    `heads` query heads share one KV head. The kernel is causal. With `masked` it reads an array of booleans instead, as
    MLX does for windows.
    """
    queries, keys = end - first, key_rows(dim)
    query_tiles = -(-queries // QUERY_ROWS)
    params = np.zeros(1, PARAMS)
    values: dict[str, float | list[int]] = {
        "B": 1,
        "H": heads,
        "D": dim,
        "qL": queries,
        "kL": end,
        "gqa_factor": heads,
        "scale": 1.0,
        "NQ": query_tiles,
        "NK": -(-end // keys),
        "NQ_aligned": queries // QUERY_ROWS,
        "NK_aligned": end // keys,
        "qL_rem": queries % QUERY_ROWS,
        "kL_rem": end % keys,
        "qL_off": first,
        **{f"{name}_strides": [heads * queries * dim, queries * dim, dim] for name in "QO"},
        **{f"{name}_strides": [end * dim, end * dim, dim] for name in "KV"},
    }
    for name, value in values.items():
        params[name] = value
    mask_params = np.zeros(1, MASK_PARAMS)
    mask_params["M_strides"] = [0, 0, end]
    name, item = _NAMES[dtype], _ITEM[dtype]
    kernel = HostKernel(
        HEADERS,
        "attention",
        f"{name}, {QUERY_ROWS}, {keys}, {dim}, {dim}, {SIMDGROUPS}, 1, {'bool' if masked else name}, float",
        {
            "align_Q": queries % QUERY_ROWS == 0,
            "align_K": end % keys == 0,
            "has_mask": masked,
            "do_causal": not masked,
            "has_sinks": False,
        },
    )
    q = np.zeros((heads, queries, dim), item)
    buffers: dict[int, Buffer] = {
        0: q,
        1: np.zeros((end, dim), item),
        2: np.zeros((end, dim), item),
        3: Output(q.nbytes, q.itemsize),
        4: params.view(np.uint8),
        5: mask_params.view(np.uint8),
        6: np.ones((queries, end), bool) if masked else np.zeros(8, item),
        7: np.zeros(8, item),
    }
    return kernel(buffers, (query_tiles, heads, 1), (32, SIMDGROUPS, 1)).report
