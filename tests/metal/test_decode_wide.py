"""Heads that several simdgroups share out, and values that lie in their keys, against attention in float64.

Small heads go the same way as large ones: the slice that always runs has few numbers, the full matrix the real sizes.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cortexmlx.metal.kernels import DecodeKernels
from cortexmlx.metal.lab import sim
from cortexmlx.metal.rules import Variant, refusal
from cortexmlx.metal.shape import DTYPES
from support.kernels.paged_problem import (
    WIDE,
    Options,
    answer,
    answers,
    attend,
    error,
    random_rows,
    several_queries,
)

DIMS = [(576, 512, True), (320, 256, True), (288, 256, True), (512, 512, False), (288, 320, False), (576, 448, False)]


@pytest.fixture(params=list(WIDE))
def v(request: pytest.FixtureRequest) -> Variant:
    """A small variant of either kind."""
    return WIDE[request.param]


def test_several_query_tokens_with_a_cap_and_sinks(
    kernels: DecodeKernels, tolerance: dict[str, float], v: Variant
) -> None:
    """With a window, so that tokens of one tile begin and end at different places."""
    v = replace(v, query_tokens=3)
    rows, queries = several_queries(v, [3, 18, 258, 300])
    options = Options(window=14, softcap=3.0, sinks=np.linspace(-3, 5, 2 * v.group).astype(np.float32))
    got = attend(kernels, v, rows, options, queries=queries, tail_tokens=3)
    assert error(got, answers(v, rows, queries, options)) < tolerance["float32"]


@pytest.mark.parametrize("v", [*WIDE.values(), Variant("float32", "float32", 64, 64, 8, 3)], ids=lambda v: v.label)
def test_a_token_that_an_older_query_does_not_see_does_not_raise_its_maximum(
    kernels: DecodeKernels, tolerance: dict[str, float], v: Variant
) -> None:
    """The newest token's scores are a thousand times the others': under such a maximum nothing else would weigh."""
    v = replace(v, query_tokens=3)
    rows, queries = several_queries(v, [18, 40])
    for row in rows:
        row.keys[:, -1] *= 1000
    got = attend(kernels, v, rows, queries=queries, tail_tokens=3)
    assert error(got, answers(v, rows, queries)) < tolerance["float32"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("key_dim", "value_dim", "latent"), DIMS)
def test_every_head_dim_and_dtype(
    kernels: DecodeKernels, tolerance: dict[str, float], key_dim: int, value_dim: int, latent: bool, dtype: str
) -> None:
    v = Variant(dtype, dtype, key_dim, value_dim, 32, 5, latent=latent)
    if why := refusal(v):
        assert "multiples of 32 (or 64)" in why and (key_dim - value_dim) % 64 == 32
        return
    rows = random_rows(v, [1, 40, 300])
    for window in (None, 30):
        with sim.options(poison=True):
            got = attend(kernels, v, rows, Options(window=window), tail_tokens=1)
        assert error(got, answer(v, rows, Options(window=window))) < tolerance[dtype]


@pytest.mark.slow
@pytest.mark.parametrize("dtypes", [("float32", "float16"), ("bfloat16", "float16"), ("float16", "bfloat16")])
@pytest.mark.parametrize("group", [16, 20, 128])
def test_many_query_heads_of_latent_attention(
    kernels: DecodeKernels, tolerance: dict[str, float], group: int, dtypes: tuple[str, str]
) -> None:
    v = Variant(*dtypes, 576, 512, 32, group, latent=True)
    rows = random_rows(v, [40, 530] if group < 128 else [40], kv_heads=1)
    assert error(attend(kernels, v, rows, tail_tokens=9), answer(v, rows)) < tolerance[dtypes[0]]


@pytest.mark.slow
@pytest.mark.parametrize("group", [1, 2, 7, 8, 9, 15, 16, 17, 24, 31, 64, 127, 128])
def test_every_number_of_query_heads(
    kernels: DecodeKernels, tolerance: dict[str, float], v: Variant, group: int
) -> None:
    v = replace(v, group=group)
    rows = random_rows(v, [1, 33, 520])
    assert error(attend(kernels, v, rows, tail_tokens=1), answer(v, rows)) < tolerance["float32"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_partial_results_are_of_single_precision(
    kernels: DecodeKernels, tolerance: dict[str, float], v: Variant, dtype: str
) -> None:
    """Of one partition the reduce kernel's result in float32 is what the partial result says."""
    v = replace(v, dtype="float32", kv_dtype=dtype)
    rows = random_rows(v, [40, 200])
    assert error(attend(kernels, v, rows), answer(v, rows)) < tolerance["float32"]
