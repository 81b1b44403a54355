"""The decode kernels against attention in float64, on the simulator or a GPU (`conftest.py`).

The slice that always runs; `test_decode_matrix.py` has the full matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cortexmlx.metal.kernels import DecodeKernels
from cortexmlx.metal.lab import sim
from cortexmlx.metal.rules import Variant, refusal
from cortexmlx.metal.shape import PARTITION, Kernel
from support.kernels import paged_problem, quantized_problem
from support.kernels.paged_problem import (
    COLUMNS,
    GPU_TOLERANCE,
    TOLERANCE,
    WIDE,
    Options,
    Row,
    answer,
    answers,
    error,
    far_slabs,
    problem,
    random_rows,
    rounded,
    several_queries,
    variant,
)

KERNELS = {"vector": variant(), "matrix": variant(group=3, dim=64, forced_kernel=Kernel.MATRIX)}
"""A small variant of each kernel of a partition."""
QUANTIZED = {
    "quantized vector": quantized_problem.variant(),
    "quantized matrix": quantized_problem.variant(group=3, dim=64),
}
EVERY = KERNELS | WIDE | QUANTIZED
"""And of the wide kernel, and of those that read codes."""

CONTEXTS = (0, 1, 7, 8, 9, 31, 32, 33, 255, 256, 257, 511, 512, 513, 4097)


@pytest.fixture(params=list(KERNELS))
def v(request: pytest.FixtureRequest) -> Variant:
    """A variant that runs on the kernel that it is named for."""
    chosen = KERNELS[request.param]
    assert chosen.kernel.value == request.param
    return chosen


@pytest.fixture(params=list(EVERY))
def each(request: pytest.FixtureRequest) -> Variant:
    """A variant of every kernel that runs on it."""
    chosen, kernel = EVERY[request.param], request.param.split()[-1]
    assert chosen.kernel.value == ("wide" if kernel in WIDE else kernel) and refusal(chosen) is None
    return chosen


def rows_of(v: Variant, tokens: Sequence[int], **drawn: Any) -> Sequence[Row]:
    """Rows of so many tokens, whose keys and values are codes if the variant's are."""
    return (random_rows if v.kv_bits is None else quantized_problem.quantized_rows)(v, tokens, **drawn)


def attend(kernels: DecodeKernels, v: Variant, rows: Sequence[Any], *options: Options, **places: Any) -> np.ndarray:
    """The kernels' result, whatever the keys and values are."""
    attended = paged_problem.attend if v.kv_bits is None else quantized_problem.attend_quantized
    return attended(kernels, v, rows, *options, **places)


def test_every_length_of_context_in_one_batch(
    kernels: DecodeKernels, tolerance: dict[str, float], each: Variant
) -> None:
    rows = rows_of(each, CONTEXTS[: None if each in KERNELS.values() else -1])
    with sim.options(poison=True):
        got = attend(kernels, each, rows)
    assert error(got, answer(each, rows)) < tolerance["float32"]


@pytest.mark.parametrize("batch", [1, 7, 8, 9, 33])
def test_batches_of_mixed_lengths(kernels: DecodeKernels, tolerance: dict[str, float], batch: int) -> None:
    v = variant()
    tokens = np.random.default_rng(batch).integers(1, 700, batch)
    tokens[0] = 1 + 4096 * (batch == 7)
    rows = random_rows(v, tokens, seed=batch)
    assert error(attend(kernels, v, rows), answer(v, rows)) < tolerance["float32"]


@pytest.mark.parametrize(
    "v",
    [
        Variant("float16", "float16", 64, 64, 32, 3, forced_kernel=Kernel.MATRIX),
        Variant("bfloat16", "bfloat16", 80, 80, 16, 1),
        Variant("float32", "float32", 192, 128, 64, 7, forced_kernel=Kernel.MATRIX),
        Variant("float16", "float16", 256, 256, 128, 16, forced_kernel=Kernel.MATRIX),
        Variant("float32", "float16", 96, 112, 8, 5, forced_kernel=Kernel.MATRIX),
        # A lane's numbers of a matrix come 8, 4, 2 and 1 at a time.
        Variant("bfloat16", "bfloat16", 72, 120, 32, 11, forced_kernel=Kernel.MATRIX),
        Variant("float16", "float16", 64, 64, 32, 6, forced_kernel=Kernel.VECTOR),
        Variant("float16", "float16", 64, 64, 32, 3, forced_kernel=Kernel.VECTOR),
        Variant("float32", "float32", 192, 128, 64, 7, forced_kernel=Kernel.VECTOR),
        Variant("float16", "float16", 256, 256, 128, 16, forced_kernel=Kernel.VECTOR),
        Variant("float32", "float16", 96, 112, 8, 5, forced_kernel=Kernel.VECTOR),
        Variant("float16", "float16", 480, 448, 32, 2, latent=True),  # values in four chunks
        Variant("bfloat16", "bfloat16", 384, 320, 32, 2, latent=True),  # and in eight parts
    ],
    ids=lambda v: v.label,
)
def test_dtypes_and_shapes(kernels: DecodeKernels, tolerance: dict[str, float], v: Variant) -> None:
    rows = random_rows(v, [300, 17, 65])
    with sim.options(poison=True):
        got = attend(kernels, v, rows, tail_tokens=5)
    assert error(got, answer(v, rows)) < tolerance[v.dtype]


def test_the_tail_may_begin_at_any_position(kernels: DecodeKernels, tolerance: dict[str, float], each: Variant) -> None:
    few = (0, 1, 7, 8, 30, 31, 32, 250, 255, 256)
    places = (*range(0, 40), *range(248, 264)) if each in KERNELS.values() else few
    for tail_tokens in (1, COLUMNS):
        rows = rows_of(each, [p + tail_tokens for p in places], seed=tail_tokens)
        got = attend(kernels, each, rows, tail_tokens=tail_tokens)
        assert error(got, answer(each, rows)) < tolerance["float32"]
        assert np.array_equal(got, attend(kernels, each, rows)), "a token's place must not change a bit of the result"


def test_a_row_is_bitwise_the_same_alone_and_anywhere_in_a_batch(kernels: DecodeKernels, each: Variant) -> None:
    v = replace(each, dtype="float16", kv_dtype="float16", kv_bits=each.kv_bits and 4)
    rows = rows_of(v, [300, 1, 513, 40, 256, *[9, 700] * (each in KERNELS.values())])
    alone = [attend(kernels, v, [row], seed=i)[0] for i, row in enumerate(rows)]
    for turn in range(len(rows)):
        order = [(i + turn) % len(rows) for i in range(len(rows))]
        together = attend(kernels, v, [rows[i] for i in order], seed=turn, tail_tokens=min(turn, 1))
        for place, i in enumerate(order):
            assert np.array_equal(together[place], alone[i]), f"row {i} at place {place}"


@pytest.mark.parametrize("forced", [Kernel.MATRIX, Kernel.VECTOR])
def test_every_tile_and_part_is_bitwise_the_same_alone_and_in_a_batch(
    kernels: DecodeKernels, tolerance: dict[str, float], forced: Kernel
) -> None:
    """Nine heads of values that the matrix kernel cuts in two: four threadgroups, of the vector kernel three."""
    v = Variant("bfloat16", "bfloat16", 64, 192, 32, 9, forced_kernel=forced)
    assert v.geometry.threadgroups == (4 if forced is Kernel.MATRIX else 3)
    rows = random_rows(v, [300, 40])
    together = attend(kernels, v, rows, tail_tokens=7)
    assert error(together, answer(v, rows)) < tolerance["bfloat16"]
    for row, found in zip(rows, together, strict=True):
        assert np.array_equal(attend(kernels, v, [row])[0], found)


def test_rows_may_share_blocks(kernels: DecodeKernels, tolerance: dict[str, float], v: Variant) -> None:
    first, *others = random_rows(v, [50, 33, 41])
    rows = [first]
    for row in others:
        keys, values = row.keys.copy(), row.values.copy()
        keys[:, :32], values[:, :32] = first.keys[:, :32], first.values[:, :32]
        rows.append(Row(row.query, keys, values))
    assert error(attend(kernels, v, rows, shared=4), answer(v, rows)) < tolerance["float32"]


@pytest.mark.parametrize("window", [1, 8, 12, 100, 256, 300, 5000])
def test_sliding_windows(kernels: DecodeKernels, tolerance: dict[str, float], window: int, each: Variant) -> None:
    rows = rows_of(each, [3, 8, 20, 256, 257, 600, *[1100] * (each in KERNELS.values())])
    got = attend(kernels, each, rows, Options(window=window), tail_tokens=3)
    assert error(got, answer(each, rows, Options(window=window))) < tolerance["float32"]


def _row_with_logits(v: Variant, logits: np.ndarray, seed: int = 0) -> Row:
    """A row whose token t has logit `logits[t]` for every head, at scale 1."""
    (row,) = random_rows(v, [len(logits)], seed=seed)
    query, keys = np.zeros_like(row.query), np.zeros_like(row.keys)
    query[:, 5] = 1.0
    keys[:, :, 5] = rounded(logits, v.kv_dtype)
    return Row(query, keys, keys[..., : v.value_dim] if v.latent else row.values)


@pytest.mark.parametrize(
    "v", [*KERNELS.values(), pytest.param(WIDE["apart"], marks=pytest.mark.slow)], ids=[*KERNELS, "apart"]
)
@pytest.mark.parametrize("level", [-40.0, -1e4, 1e4, -1e5, -1e30])
def test_logits_far_from_zero(kernels: DecodeKernels, tolerance: dict[str, float], level: float, v: Variant) -> None:
    logits = level + np.random.default_rng(1).integers(-2, 3, 600) / 4
    options = Options(scale=1.0)
    got = attend(kernels, v, [_row_with_logits(v, logits)], options)
    assert error(got, answer(v, [_row_with_logits(v, logits)], options)) < tolerance["float32"]


def test_one_token_ten_thousand_above_the_others(kernels: DecodeKernels, v: Variant) -> None:
    for at in (0, 31, 300, 599):
        logits = np.full(600, -1e4)
        logits[at] = 1e4
        row = _row_with_logits(v, logits)
        got = attend(kernels, v, [row], Options(scale=1.0))
        assert np.array_equal(got[0], np.repeat(row.values[:, at], v.group, axis=0))


def test_a_first_partition_that_weighs_nothing_leaves_no_trace(kernels: DecodeKernels, v: Variant) -> None:
    logits = np.where(np.arange(600) < PARTITION, -200.0, -40.0)
    row = _row_with_logits(v, logits)
    mean = row.values[:, PARTITION:].astype(np.float64).mean(axis=1)
    assert error(attend(kernels, v, [row], Options(scale=1.0))[0], np.repeat(mean, v.group, axis=0)) < 1e-6


def test_every_kernel_lives_with_the_errors_that_metal_allows_fast_functions(each: Variant) -> None:
    kernels, rows = DecodeKernels(sim.metal_kernel), rows_of(each, [300, 17, 700])
    options = Options(sinks=np.linspace(-2, 4, 2 * each.group).astype(np.float32))
    with sim.options(fast_errors=True):
        got = attend(kernels, each, rows, options)
    assert error(got, attend(kernels, each, rows, options)) > 0, "there were none"
    assert error(got, answer(each, rows, options)) < GPU_TOLERANCE["float32"]


def test_half_precision_products_do_not_overflow(
    kernels: DecodeKernels, tolerance: dict[str, float], v: Variant
) -> None:
    v = replace(v, dtype="float16", kv_dtype="float16", key_dim=64, value_dim=64)
    rows = random_rows(v, [100, 300], size=120.0)
    options = Options(scale=1e-5)
    assert np.abs(rows[0].keys[0] @ rows[0].query[0]).max() > 65504
    assert error(attend(kernels, v, rows, options), answer(v, rows, options)) < tolerance["float16"]


def test_sums_beyond_the_largest_half(kernels: DecodeKernels, tolerance: dict[str, float], v: Variant) -> None:
    v = replace(v, dtype="float16", kv_dtype="float16")
    (row,) = random_rows(v, [700])
    row = replace(row, query=np.zeros_like(row.query), values=rounded(row.values + 200, "float16"))
    assert row.values.sum(axis=1).min() > 2 * 65504
    assert error(attend(kernels, v, [row]), answer(v, [row])) < 200 * tolerance["float16"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_partial_results_are_of_single_precision(
    kernels: DecodeKernels, tolerance: dict[str, float], dtype: str, softcap: float | None, v: Variant
) -> None:
    """Nothing but what is loaded, and the end result, is rounded to 16 bits. (At 80 the scale is no power of two.)"""
    v = replace(v, dtype=dtype, kv_dtype=dtype, key_dim=80, value_dim=80)
    rows, options = random_rows(v, [40, PARTITION]), Options(softcap=softcap)
    partials = np.array(kernels.decode(*problem(v, rows, options)), np.float64)
    assert error(partials[..., :-2] / partials[..., -1:], answer(v, rows, options)) < tolerance["float32"]


def test_softcap(kernels: DecodeKernels, tolerance: dict[str, float], v: Variant) -> None:
    rows = random_rows(v, [70, 300], size=4.0)
    options = Options(softcap=3.0)
    assert error(attend(kernels, v, rows, options), answer(v, rows, options)) < tolerance["float32"]


def test_scores_far_beyond_the_softcap(kernels: DecodeKernels, tolerance: dict[str, float], v: Variant) -> None:
    """The hyperbolic tangent is 1 there. Metal's fast one, a quotient of two exponentials, is no number."""
    logits = np.where(np.arange(600) % 3, 1e4, -1e4)
    options = Options(scale=1.0, softcap=3.0)
    got = attend(kernels, v, [_row_with_logits(v, logits)], options)
    assert error(got, answer(v, [_row_with_logits(v, logits)], options)) < tolerance["float32"]


def test_sinks_count_once_whatever_their_height(
    kernels: DecodeKernels, tolerance: dict[str, float], each: Variant
) -> None:
    v = replace(each, group=4)
    rows = rows_of(v, [0, 5, 300, 700])
    options = Options(sinks=np.array([-1e4, -3.0, 0.0, 1.0, 4.0, 20.0, 200.0, 1e4], np.float32))
    got = attend(kernels, v, rows, options)
    assert error(got, answer(v, rows, options)) < tolerance["float32"]
    assert not got[0].any()


@pytest.mark.parametrize("level", [-300.0, 300.0])
def test_sinks_beside_logits_far_from_zero(
    kernels: DecodeKernels, tolerance: dict[str, float], level: float, v: Variant
) -> None:
    v = replace(v, group=4)
    row = _row_with_logits(v, level + np.random.default_rng(2).integers(-2, 3, 300) / 4)
    options = Options(scale=1.0, sinks=np.float32(level) + np.arange(8, dtype=np.float32))
    assert error(attend(kernels, v, [row], options), answer(v, [row], options)) < tolerance["float32"]


@pytest.mark.parametrize(
    "v",
    [
        Variant("float16", "float16", 256, 8, 32, 2),
        Variant("float16", "float16", 256, 64, 32, 3, forced_kernel=Kernel.MATRIX),
        Variant("float16", "float16", 544, 32, 32, 2),  # of the wide kernel: a part's share of a key has a fifth chunk
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


# Several query tokens per row: a row's newest tokens, each of which sees what was before it and itself.


CASES = [
    Variant("float32", "float32", 64, 64, 8, 2, query_tokens=4),
    Variant("float16", "float16", 64, 64, 16, 4, query_tokens=2),
    Variant("float32", "float32", 64, 64, 32, 1, query_tokens=8),
    Variant("bfloat16", "bfloat16", 128, 80, 32, 5, query_tokens=3),
]


@pytest.mark.parametrize("v", CASES, ids=lambda v: v.label)
@pytest.mark.parametrize("window", [None, 5, 300])
def test_each_token_sees_what_was_before_it(
    kernels: DecodeKernels, tolerance: dict[str, float], v: Variant, window: int | None
) -> None:
    assert v.kernel is Kernel.MATRIX and refusal(v) is None
    # The boundary of two partitions, or of two slices, between the query tokens; rows as short as there are queries.
    rows, queries = several_queries(v, [8, 33, 35, 100, 256, 257, 260, 263, 600])
    with sim.options(poison=True):
        got = attend(kernels, v, rows, Options(window=window), queries=queries, tail_tokens=6)
    assert error(got, answers(v, rows, queries, Options(window=window))) < tolerance[v.dtype]


def test_sinks_and_softcap_are_those_of_the_query_head(kernels: DecodeKernels, tolerance: dict[str, float]) -> None:
    v = CASES[0]
    rows, queries = several_queries(v, [40, 300])
    options = Options(softcap=3.0, sinks=np.array([-2.0, 0.0, 3.0, 6.0], np.float32))
    assert (
        error(attend(kernels, v, rows, options, queries=queries), answers(v, rows, queries, options))
        < (tolerance["float32"])
    )


def test_the_newest_token_gets_bitwise_the_same_wherever_the_tail_begins(kernels: DecodeKernels) -> None:
    v = CASES[0]
    rows, queries = several_queries(v, [40, 258, 300])
    first, *others = (attend(kernels, v, rows, queries=queries, tail_tokens=tail) for tail in (0, 1, 4, 16))
    assert all(np.array_equal(first, other) for other in others)
