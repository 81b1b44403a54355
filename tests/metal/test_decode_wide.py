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
from cortexmlx.metal.shape import DTYPES, Kernel
from support.kernels.paged_problem import (
    TOLERANCE,
    Options,
    Row,
    answer,
    answers,
    attend,
    error,
    far_slabs,
    random_rows,
    rounded,
    several_queries,
)

SMALL = {
    "latent": Variant("float32", "float32", 64, 32, 8, 11, latent=True),  # two tiles, the second not full
    "apart": Variant("float32", "float16", 288, 32, 8, 3),  # a lane's numbers of a key come 8 and 2 at a time
}
LENGTHS = (1, 15, 16, 17, 33, 255, 257, 513)
DIMS = [(576, 512, True), (320, 256, True), (288, 256, True), (512, 512, False), (288, 320, False), (576, 448, False)]


@pytest.fixture(params=list(SMALL))
def v(request: pytest.FixtureRequest) -> Variant:
    """A small variant of either kind."""
    return SMALL[request.param]


def test_rows_of_every_length_with_poison_where_nothing_lives(
    kernels: DecodeKernels, tolerance: dict[str, float], v: Variant
) -> None:
    assert v.kernel is Kernel.WIDE and refusal(v) is None
    rows = random_rows(v, LENGTHS)
    with sim.options(poison=True):
        got = attend(kernels, v, rows, tail_tokens=1)
    assert error(got, answer(v, rows)) < tolerance["float32"]


@pytest.mark.parametrize("window", [1, 20, 300])
def test_sliding_windows(kernels: DecodeKernels, tolerance: dict[str, float], v: Variant, window: int) -> None:
    rows = random_rows(v, [5, 30, 257, 540])
    got = attend(kernels, v, rows, Options(window=window), tail_tokens=3)
    assert error(got, answer(v, rows, Options(window=window))) < tolerance["float32"]


def test_a_row_is_bitwise_the_same_alone_in_a_batch_and_wherever_its_tail_begins(
    kernels: DecodeKernels, v: Variant
) -> None:
    rows = random_rows(v, [300, 16, 530, 17, 40])
    together = attend(kernels, v, rows, seed=7)
    for tail_tokens in (1, 9, 16):
        assert np.array_equal(together, attend(kernels, v, rows, tail_tokens=tail_tokens)), tail_tokens
    for place, row in enumerate(rows):
        assert np.array_equal(together[place], attend(kernels, v, [row], seed=place, tail_tokens=3)[0]), place


def test_several_query_tokens_with_a_cap_and_sinks(
    kernels: DecodeKernels, tolerance: dict[str, float], v: Variant
) -> None:
    """With a window, so that tokens of one tile begin and end at different places."""
    v = replace(v, query_tokens=3)
    rows, queries = several_queries(v, [3, 18, 258, 300])
    options = Options(window=14, softcap=3.0, sinks=np.linspace(-3, 5, 2 * v.group).astype(np.float32))
    got = attend(kernels, v, rows, options, queries=queries, tail_tokens=3)
    assert error(got, answers(v, rows, queries, options)) < tolerance["float32"]


@pytest.mark.parametrize("v", [*SMALL.values(), Variant("float32", "float32", 64, 64, 8, 3)], ids=lambda v: v.label)
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
@pytest.mark.parametrize("query_tokens", [2, 5, 8])
@pytest.mark.parametrize("group", [1, 3, 8, 20])
def test_every_number_of_query_tokens(
    kernels: DecodeKernels, tolerance: dict[str, float], v: Variant, group: int, query_tokens: int
) -> None:
    v = replace(v, group=group, query_tokens=query_tokens)
    rows, queries = several_queries(v, [8, 40, 257, 520])
    for window in (None, 20):
        got = attend(kernels, v, rows, Options(window=window), queries=queries, tail_tokens=5)
        assert error(got, answers(v, rows, queries, Options(window=window))) < tolerance["float32"]


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [1, 8, 16, 64, 128])
@pytest.mark.parametrize("options", [Options(), Options(window=70), Options(softcap=5.0)], ids=str)
def test_every_block_size(
    kernels: DecodeKernels, tolerance: dict[str, float], v: Variant, block_size: int, options: Options
) -> None:
    v = replace(v, block_size=block_size)
    for tail_tokens in (0, 1, 16):
        rows = random_rows(v, [n + tail_tokens for n in LENGTHS])
        got = attend(kernels, v, rows, options, tail_tokens=tail_tokens)
        assert error(got, answer(v, rows, options)) < tolerance["float32"]


@pytest.mark.slow
@pytest.mark.parametrize("tail_tokens", range(17))
def test_a_boundary_at_every_position_changes_no_bit(
    kernels: DecodeKernels, tolerance: dict[str, float], v: Variant, tail_tokens: int
) -> None:
    v = replace(v, dtype="float16", kv_dtype="float16", group=3)
    for first in (0, 240, 500):
        rows = random_rows(v, [p + tail_tokens for p in range(first, first + 35)], seed=first)
        got = attend(kernels, v, rows, tail_tokens=tail_tokens)
        assert np.array_equal(got, attend(kernels, v, rows, seed=1))
        assert error(got, answer(v, rows)) < tolerance["float16"]


@pytest.mark.slow
@pytest.mark.parametrize("level", [-40.0, -1e4, 1e4, -1e5, -1e30])
def test_logits_far_from_zero(kernels: DecodeKernels, tolerance: dict[str, float], level: float) -> None:
    v = SMALL["apart"]
    (row,) = random_rows(v, [600])
    query, keys = np.zeros_like(row.query), np.zeros_like(row.keys)
    query[:, 5] = 1.0
    keys[:, :, 5] = rounded(level + np.random.default_rng(1).integers(-2, 3, 600) / 4, v.kv_dtype)
    row, options = Row(query, keys, row.values), Options(scale=1.0)
    assert error(attend(kernels, v, [row], options), answer(v, [row], options)) < tolerance["float32"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_partial_results_are_of_single_precision(
    kernels: DecodeKernels, tolerance: dict[str, float], v: Variant, dtype: str
) -> None:
    """Of one partition the reduce kernel's result in float32 is what the partial result says."""
    v = replace(v, dtype="float32", kv_dtype=dtype)
    rows = random_rows(v, [40, 200])
    assert error(attend(kernels, v, rows), answer(v, rows)) < tolerance["float32"]


@pytest.mark.parametrize(
    "v",
    [
        Variant("float16", "float16", 544, 32, 32, 2),  # a part's share of a key has a fifth chunk
        pytest.param(Variant("float16", "float16", 576, 512, 32, 2), marks=pytest.mark.slow),
        pytest.param(Variant("float16", "float16", 576, 512, 32, 2, latent=True), marks=pytest.mark.slow),
    ],
    ids=lambda v: v.label,
)
def test_offsets_beyond_32_bits(v: Variant) -> None:
    """Slabs of 4.8 thousand million numbers per head, all zero but for the row's blocks at their ends."""
    (row,) = random_rows(v, [70])
    layout, arena = far_slabs(v, row)
    got = attend(DecodeKernels(sim.metal_kernel), v, [row], layout=layout, arena=arena)
    assert error(got, answer(v, [row])) < TOLERANCE["float16"]
