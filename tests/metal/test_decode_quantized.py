"""The decode kernels on quantized keys and values, against attention in float64 over what the codes stand for."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from cortexmlx.errors import MemoryRefused
from cortexmlx.metal.kernels import LARGEST, DecodeKernels
from cortexmlx.metal.lab import sim
from cortexmlx.metal.rules import Variant, refusal
from cortexmlx.metal.shape import Kernel
from support.kernels.paged_problem import TOLERANCE, Options, answer, answers, error, rounded
from support.kernels.quantized_problem import (
    attend_quantized,
    dequantized,
    quantized_problem,
    quantized_row,
    quantized_rows,
    variant,
)

KERNELS = {"vector": variant(), "matrix": variant(group=3, dim=64)}
"""A small variant of each kernel of a partition."""


@pytest.fixture(params=list(KERNELS))
def v(request: pytest.FixtureRequest) -> Variant:
    """A variant that runs on the kernel that it is named for."""
    chosen = KERNELS[request.param]
    assert chosen.kernel.value == request.param and refusal(chosen) is None
    return chosen


def test_what_codes_stand_for_is_what_mlx_says() -> None:
    for v in (variant(bits=8), variant(bits=4, quant_group=64, dim=64)):
        (row,) = quantized_rows(v, [50])
        parts = [mx.array(a) for a in row.key_parts]
        mlx = np.array(mx.dequantize(*parts, group_size=v.quant_group, bits=v.kv_bits))
        np.testing.assert_allclose(dequantized(v, row.key_parts), mlx, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "v",
    [
        variant(group=1, dim=64, bits=8, quant_group=64, dtype="float16", kv_dtype="float16", block_size=32),
        variant(group=2, dim=128, bits=4, quant_group=64, dtype="bfloat16", kv_dtype="bfloat16"),
        variant(group=2, dim=96, bits=4),
        pytest.param(
            variant(group=8, dim=128, bits=8, quant_group=64, dtype="float16", kv_dtype="float16", block_size=32),
            marks=pytest.mark.slow,
        ),
        variant(group=4, dim=128, bits=4, quant_group=64, block_size=16),
        pytest.param(
            variant(group=5, dim=256, bits=4, dtype="float16", kv_dtype="bfloat16", forced_kernel=Kernel.MATRIX),
            marks=pytest.mark.slow,
        ),
        variant(group=3, dim=128, bits=8, value_dim=64, block_size=16),
        variant(
            group=2, dim=64, quant_group=64, value_dim=256, block_size=16, forced_kernel=Kernel.MATRIX
        ),  # a value of two parts
        # A lane of the vector kernel has two neighbours of a head of 64: a load of 16 bits, or of 8.
        variant(group=2, dim=64, bits=8, forced_kernel=Kernel.VECTOR),
        variant(
            group=1, dim=64, bits=4, quant_group=64, dtype="float16", kv_dtype="bfloat16", forced_kernel=Kernel.VECTOR
        ),
    ],
    ids=lambda v: v.label,
)
def test_bits_groups_dims_and_dtypes(kernels: DecodeKernels, tolerance: dict[str, float], v: Variant) -> None:
    rows = quantized_rows(v, [300, 17, 65])
    with sim.options(poison=True):
        got = attend_quantized(kernels, v, rows, tail_tokens=5)
    assert error(got, answer(v, rows)) < tolerance[v.dtype]


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_partial_results_are_of_single_precision(
    kernels: DecodeKernels, tolerance: dict[str, float], softcap: float | None, v: Variant
) -> None:
    """Codes, scales and biases are exact in halves, and nothing else is rounded to 16 bits."""
    v = replace(v, dtype="float16", kv_dtype="float16")
    rows, options = quantized_rows(v, [40, 256]), Options(softcap=softcap)
    partials = np.array(kernels.decode(*quantized_problem(v, rows, options)), np.float64)
    assert error(partials[..., :-2] / partials[..., -1:], answer(v, rows, options)) < tolerance["float32"]


def test_numbers_far_from_zero_keep_what_their_codes_say(kernels: DecodeKernels, v: Variant) -> None:
    """A bias of 50 steps of a scale's range cancels in no sum: the scores are of differences of a hundredth."""
    (row,) = quantized_rows(v, [200])
    parts = (row.key_parts[0], row.key_parts[1] / 64, row.key_parts[2] / 64 + 4.0)
    values = (row.value_parts[0], row.value_parts[1], row.value_parts[2] + 50.0)
    moved = replace(row, keys=dequantized(v, parts), values=dequantized(v, values), key_parts=parts, value_parts=values)
    assert error(attend_quantized(kernels, v, [moved]), answer(v, [moved])) < 1e-4


@pytest.mark.parametrize("window", [None, 5])
def test_each_of_several_query_tokens_sees_what_was_before_it(
    kernels: DecodeKernels, tolerance: dict[str, float], window: int | None
) -> None:
    v = replace(KERNELS["matrix"], group=2, query_tokens=4, kv_bits=4)
    assert v.kernel is Kernel.MATRIX and refusal(v) is None
    rows = quantized_rows(v, [8, 33, 100, 257, 300])
    queries = rounded(np.random.default_rng(1).standard_normal((5, 4, 4, v.key_dim)), v.dtype)
    with sim.options(poison=True):
        got = attend_quantized(kernels, v, rows, Options(window=window), queries=queries, tail_tokens=6)
    assert error(got, answers(v, rows, queries, Options(window=window))) < tolerance[v.dtype]


@pytest.mark.parametrize("slab", ["keys", "values"])
def test_more_words_than_are_counted_are_refused(slab: str) -> None:
    v = KERNELS["vector"]
    configured, items, inputs = quantized_problem(v, quantized_rows(v, [3]))
    slots = LARGEST // 8 + 8
    huge = sim.SparseArray((1, slots, 8), mx.uint32)
    with pytest.raises(MemoryRefused, match=str(LARGEST)):
        DecodeKernels(sim.metal_kernel)(configured, items, replace(inputs, **{slab: huge}))


@pytest.mark.parametrize("forced", [Kernel.VECTOR, Kernel.MATRIX], ids=lambda kernel: kernel.value)
def test_the_last_slots_of_as_many_words_as_are_counted(forced: Kernel) -> None:
    """Slabs of all the words that are not refused, all zero but for the row's blocks at their ends. Of 64 numbers of 4
    bits a lane of the vector kernel loads bytes, of which 32 bits count the fewest words.
    """
    v = variant(group=3, dim=64, bits=4, forced_kernel=forced)
    assert refusal(v) is None
    (row,) = quantized_rows(v, [21])
    configured, items, inputs = quantized_problem(v, [row])
    slots = LARGEST // 2 // 8
    blocks = slots // v.block_size - np.array([1, 3, 2, *range(4, 9)])

    def slab(numbers: np.ndarray, dtype: mx.Dtype) -> sim.SparseArray:
        made = sim.SparseArray((2, slots, numbers.shape[-1]), dtype)
        for b, block in enumerate(blocks[:3]):
            for h in range(2):
                part = numbers[h, b * v.block_size :][: v.block_size]
                made.put((h, int(block) * v.block_size, 0), mx.array(part))
        return made

    (keys, *of_keys), (values, *of_values) = (
        [slab(a, t) for a, t in zip(parts, (mx.uint32, mx.float32, mx.float32), strict=True)]
        for parts in (row.key_parts, row.value_parts)
    )
    scales = (of_keys[0], of_values[0], *inputs.scales[2:])
    biases = (of_keys[1], of_values[1], *inputs.biases[2:])
    tables = mx.array(blocks[None].astype(np.int32))
    given = replace(inputs, keys=keys, values=values, scales=scales, biases=biases, tables=tables)
    got = np.array(DecodeKernels(sim.metal_kernel)(configured, items, given))[:, :, 0]
    assert error(got, answer(v, [row])) < TOLERANCE["float32"]


@pytest.mark.slow
@pytest.mark.parametrize("forced", [None, Kernel.VECTOR], ids=["as the rules say", "vector"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize(("bits", "of"), [(8, 32), (8, 64), (4, 32), (4, 64)])
def test_the_matrix_of_quantizations(
    kernels: DecodeKernels, tolerance: dict[str, float], bits: int, of: int, dim: int, dtype: str, forced: Kernel | None
) -> None:
    if dim % of:
        return
    for group in (1, 4, 8):
        v = Variant(dtype, dtype, dim, dim, 32, group, kv_bits=bits, quant_group=of, forced_kernel=forced)
        rows = quantized_rows(v, [10, 40, 42, 264, 266, 522])
        for window in (None, 300):
            got = attend_quantized(kernels, v, rows, Options(window=window), tail_tokens=9)
            assert error(got, answer(v, rows, Options(window=window))) < tolerance[dtype]


def test_quantizing_once_more_need_not_give_the_same_codes() -> None:
    """Why a tail keeps codes: what they stand for, quantized again, is another key here and there."""
    v = variant(dim=64, bits=4, dtype="float16", kv_dtype="float16")
    (row,) = quantized_rows(v, [2000])
    again = quantized_row(v, row)
    assert not all(np.array_equal(a, b) for a, b in zip(row.key_parts, again.key_parts, strict=True))
