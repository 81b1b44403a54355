"""Rows of one partition: one launch leaves the bits that two leave, whatever the other rows of the step are."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from cortexmlx.metal.kernels import DecodeKernels
from cortexmlx.metal.lab import sim
from cortexmlx.metal.rules import Variant
from cortexmlx.metal.shape import Kernel
from support.kernels.paged_problem import (
    Options,
    answer,
    answers,
    attend,
    error,
    problem,
    random_rows,
    several_queries,
    variant,
)
from support.kernels.quantized_problem import quantized_problem, quantized_rows

VARIANTS = (
    variant(group=5, dim=16, dtype="bfloat16"),
    variant(group=11, dim=64, dtype="float16", forced_kernel=Kernel.MATRIX),
    Variant("float32", "float32", 320, 256, 32, 10, latent=True),
)
"""Each kernel, with several tiles."""


def _whole(kernels: DecodeKernels, v: Variant, tokens: list[int], options: Options, **places: object) -> np.ndarray:
    given = problem(v, random_rows(v, tokens), options, **places)  # type: ignore[arg-type]
    return np.array(kernels.decode_and_reduce(*given).astype(mx.float32))[:, :, 0]


@pytest.mark.parametrize("v", VARIANTS, ids=lambda v: v.label)
def test_one_launch_leaves_the_bits_of_two_whatever_the_other_rows_are(
    kernels: DecodeKernels, tolerance: dict[str, float], v: Variant
) -> None:
    tokens, heads = [200, 0, 1, 33, 256], 2 * v.group
    several = [*tokens, 700]
    for options in (Options(), Options(sinks=np.linspace(-4, 6, heads).astype(np.float32))):
        rows = random_rows(v, several)
        with sim.options(poison=True):
            whole = _whole(kernels, v, tokens, options)
        assert error(whole, answer(v, rows[:-1], options)) < tolerance[v.dtype]
        assert np.array_equal(whole, attend(kernels, v, rows[:-1], options)), "two launches, all rows of one partition"
        assert np.array_equal(whole, attend(kernels, v, rows, options)[:-1]), "beside a row of several partitions"
        assert np.array_equal(whole[:1], _whole(kernels, v, tokens[:1], options)), "alone"


def test_several_query_tokens_have_the_sink_of_their_head(kernels: DecodeKernels, tolerance: dict[str, float]) -> None:
    v = variant(group=2, dim=64, block_size=32, query_tokens=3, forced_kernel=Kernel.MATRIX)
    rows, queries = several_queries(v, [40, 3, 250])
    options = Options(sinks=np.array([-2.0, 3.0, 0.5, 9.0], np.float32))
    given = problem(v, rows, options, queries=queries)
    whole = np.array(kernels.decode_and_reduce(*given))
    assert error(whole, answers(v, rows, queries, options)) < tolerance["float32"]
    assert np.array_equal(whole, np.array(kernels(*given)))


def test_quantized_keys_and_values(kernels: DecodeKernels) -> None:
    v = variant(group=3, dim=64, dtype="float16", kv_bits=4, quant_group=32, forced_kernel=Kernel.MATRIX)
    given = quantized_problem(v, quantized_rows(v, [200, 1, 33]), Options())
    assert np.array_equal(np.array(kernels.decode_and_reduce(*given)), np.array(kernels(*given)))


def test_a_window_within_one_partition_of_a_long_row(kernels: DecodeKernels, tolerance: dict[str, float]) -> None:
    v, options = variant(), Options(window=20)
    given = problem(v, random_rows(v, [600, 280]), options)
    assert given[1] == 2
    got = np.array(kernels.decode_and_reduce(*given))[:, :, 0]
    assert error(got, answer(v, random_rows(v, [600, 280]), options)) < tolerance["float32"]
