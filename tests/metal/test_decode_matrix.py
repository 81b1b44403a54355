"""The full matrix of decode attention against float64. Slow on the simulator: minutes. On a GPU it runs with
`-m metal` or `-m cuda`, as the other cases do (`conftest.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from cortexmlx.attention.selfcheck_problems import alibi_slopes
from cortexmlx.metal.kernels import DecodeKernels
from cortexmlx.metal.rules import Variant, refusal
from cortexmlx.metal.shape import Kernel
from support.kernels.paged_problem import (
    NONE,
    WIDE,
    Options,
    answer,
    answers,
    attend,
    error,
    random_rows,
    several_queries,
    variant,
)

pytestmark = pytest.mark.slow

DIMS = (64, 80, 96, 112, 128, 192, 256)
DTYPES = ("float32", "float16", "bfloat16")
Judge = Callable[..., None]
NARROW = (Kernel.VECTOR, Kernel.MATRIX)
"""Those of a head that fits the registers of a simdgroup; `test_decode_wide.py` has the wide kernel."""
LENGTHS = (1, 31, 33, 255, 257, 513)
MATRIX = variant(group=3, dim=64, forced_kernel=Kernel.MATRIX)


@pytest.fixture(scope="module")
def judge(kernels: DecodeKernels, tolerance: dict[str, float]) -> Judge:
    """Asserts that the kernels of a variant answer rows of `LENGTHS` tokens, and more by those of the tail."""

    def judge(v: Variant, options: Options = NONE, **places: int) -> None:
        rows = random_rows(v, [n + places.get("tail_tokens", 0) for n in LENGTHS])
        got = attend(kernels, v, rows, options, **places)
        assert error(got, answer(v, rows, options)) < tolerance[v.dtype]

    return judge


@pytest.mark.parametrize("kernel", NARROW)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", DIMS)
def test_every_head_dim_and_dtype(judge: Judge, dim: int, dtype: str, kernel: Kernel) -> None:
    v = Variant(dtype, dtype, dim, dim, 32, 4, forced_kernel=kernel)
    assert (refusal(v) is None) == (kernel is Kernel.VECTOR or (dtype, dim) != ("float32", 256))
    for window in (None, 1, 300) if refusal(v) is None else ():
        judge(v, Options(window=window), tail_tokens=9)


@pytest.mark.parametrize("kernel", NARROW)
@pytest.mark.parametrize("dim", (64, 128, 256))
@pytest.mark.parametrize("group", (*range(1, 17), 24, 32, 48))
def test_every_number_of_query_heads(judge: Judge, group: int, dim: int, kernel: Kernel) -> None:
    v = Variant("float16", "float16", dim, dim, 16, group, forced_kernel=kernel)
    assert (refusal(v) is None) == (kernel is Kernel.VECTOR or group <= 16)
    if refusal(v) is None:
        judge(v, tail_tokens=3)


@pytest.mark.parametrize("forced", [None, Kernel.VECTOR], ids=["as the rules say", "vector"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", DIMS)
def test_slopes_with_every_head_dim_and_dtype(judge: Judge, dim: int, dtype: str, forced: Kernel | None) -> None:
    slopes, sinks = alibi_slopes(8), np.linspace(-2, 4, 8)
    for options in (Options(slopes=slopes), Options(window=300, slopes=slopes, sinks=sinks)):
        judge(Variant(dtype, dtype, dim, dim, 32, 4, forced_kernel=forced), options, tail_tokens=9)


@pytest.mark.parametrize("group", (*range(1, 17), 24))
def test_slopes_with_every_number_of_query_heads(judge: Judge, group: int) -> None:
    judge(Variant("float16", "float16", 64, 64, 16, group), Options(slopes=alibi_slopes(2 * group)), tail_tokens=3)


@pytest.mark.parametrize("key_dim", range(64, 257, 8))
def test_every_head_dim_that_matrices_can_cut(judge: Judge, key_dim: int) -> None:
    """Keys and values of different dims: a lane's numbers come in every mixture of 8, 4, 2 and 1."""
    value_dim = 64 + (key_dim * 7 - 64) % 72 // 8 * 8
    judge(Variant("bfloat16", "float16", key_dim, value_dim, 32, 9, forced_kernel=Kernel.MATRIX), tail_tokens=3)


@pytest.mark.parametrize("query_tokens", range(2, 9))
@pytest.mark.parametrize("group", (1, 2, 3, 4, 8, 20))
def test_every_number_of_query_tokens(
    kernels: DecodeKernels, tolerance: dict[str, float], group: int, query_tokens: int
) -> None:
    narrow = Variant("float32", "float32", 64, 80, 16, group)
    for small in (narrow, *WIDE.values()):
        v = replace(small, group=group, query_tokens=query_tokens)
        if v.kernel is Kernel.VECTOR:
            assert group * query_tokens > 16
            continue
        rows, queries = several_queries(v, [8, 40, 257, 300, 520])
        for window, slopes in product((None, 20), (None, alibi_slopes(2 * group)) if small is narrow else (None,)):
            options = Options(window=window, slopes=slopes)
            got = attend(kernels, v, rows, options, queries=queries, tail_tokens=5)
            assert error(got, answers(v, rows, queries, options)) < tolerance["float32"]


@pytest.mark.parametrize("block_size", (1, 8, 16, 32, 64, 128))
@pytest.mark.parametrize("options", [Options(), Options(window=70), Options(softcap=5.0)], ids=str)
def test_every_block_size(judge: Judge, block_size: int, options: Options) -> None:
    for tail_tokens in (0, 1, 16):
        for small in (variant(), *[MATRIX] * (block_size > 1), *WIDE.values()):
            judge(replace(small, block_size=block_size), options, tail_tokens=tail_tokens)


@pytest.mark.parametrize("small", [variant(), MATRIX, *WIDE.values()], ids=["vector", "matrix", *WIDE])
@pytest.mark.parametrize("tail_tokens", range(17))
def test_a_boundary_at_every_position_changes_no_bit(
    kernels: DecodeKernels, tolerance: dict[str, float], tail_tokens: int, small: Variant
) -> None:
    v = replace(small, group=5, dtype="float16", kv_dtype="float16")
    for first in range(0, 520, 40):
        rows = random_rows(v, [p + tail_tokens for p in range(first, first + 40)], seed=first)
        got = attend(kernels, v, rows, tail_tokens=tail_tokens)
        assert np.array_equal(got, attend(kernels, v, rows, seed=1))
        assert error(got, answer(v, rows)) < tolerance["float16"]


@pytest.mark.parametrize("small", [variant(), MATRIX], ids=["vector", "matrix"])
@pytest.mark.parametrize("batch", (1, 7, 8, 9, 33))
def test_long_mixed_batches_are_bitwise_what_each_row_is_alone(
    kernels: DecodeKernels, tolerance: dict[str, float], batch: int, small: Variant
) -> None:
    v = replace(small, group=3, dtype="bfloat16", kv_dtype="bfloat16")
    tokens = np.random.default_rng(batch).integers(1, 4098, batch)
    rows = random_rows(v, tokens, seed=batch)
    together = attend(kernels, v, rows, tail_tokens=1)
    assert error(together, answer(v, rows)) < tolerance["bfloat16"]
    for row, mine in zip(rows, together, strict=True):
        assert np.array_equal(attend(kernels, v, [row], seed=5)[0], mine)
