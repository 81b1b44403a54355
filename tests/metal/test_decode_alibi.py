"""ALiBi in the decode kernels against attention in float64: slopes times the distance of each token from its query.

A softmax does not notice what is added to all of a row's scores: where a query is counts only beside sinks.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cortexmlx.metal.kernels import DecodeKernels
from cortexmlx.metal.lab import sim
from cortexmlx.metal.rules import Variant
from cortexmlx.metal.shape import Kernel
from support.kernels.paged_problem import Options, answer, answers, attend, error, random_rows, several_queries, variant

KERNELS = {"vector": variant(group=4), "matrix": variant(group=4, dim=64)}
SLOPES = np.array([1.0, 0.25, 0.06, 0.01, 0.0, -0.02, 0.5, 0.003], np.float32)
"""Of eight heads: none but those of different steepness tell whether a head has its own."""
SINKS = np.array([-1.0, 0.5, 2.0, 3.0, -2.0, 4.0, 0.0, 1.0], np.float32)


@pytest.fixture(params=list(KERNELS))
def v(request: pytest.FixtureRequest) -> Variant:
    """A variant that runs on the kernel that it is named for."""
    chosen = KERNELS[request.param]
    assert chosen.kernel.value == request.param
    return chosen


@pytest.mark.parametrize("window", [None, 70, 300])
def test_slopes_with_windows_and_a_tail(
    kernels: DecodeKernels, tolerance: dict[str, float], v: Variant, window: int | None
) -> None:
    rows = random_rows(v, [6, 32, 33, 255, 257, 700])
    options = Options(window=window, slopes=SLOPES)
    with sim.options(poison=True):
        got = attend(kernels, v, rows, options, tail_tokens=5)
    assert error(got, answer(v, rows, options)) < tolerance["float32"]


@pytest.mark.parametrize(
    "v",
    [
        Variant("bfloat16", "bfloat16", 128, 128, 32, 1),
        Variant("float16", "float16", 64, 64, 32, 11),
        variant(group=11),
        pytest.param(Variant("float32", "float16", 80, 96, 16, 2), marks=pytest.mark.slow),
        pytest.param(Variant("float16", "float16", 64, 64, 32, 5, forced_kernel=Kernel.VECTOR), marks=pytest.mark.slow),
    ],
    ids=lambda v: v.label,
)
def test_dtypes_and_shapes(kernels: DecodeKernels, tolerance: dict[str, float], v: Variant) -> None:
    """Heads that leave a tile unfilled, or begin another, have their own slopes, too."""
    rows = random_rows(v, [300, 17, 65])
    options = Options(slopes=np.resize(SLOPES, 2 * v.group))
    with sim.options(poison=True):
        got = attend(kernels, v, rows, options, tail_tokens=5)
    assert error(got, answer(v, rows, options)) < tolerance[v.dtype]


def test_they_come_after_the_soft_cap_and_count_from_the_query(
    kernels: DecodeKernels, tolerance: dict[str, float], v: Variant
) -> None:
    rows = random_rows(v, [1, 40, 300], size=3.0)
    options = Options(softcap=2.0, sinks=SINKS, slopes=SLOPES)
    got = attend(kernels, v, rows, options, tail_tokens=1)
    assert error(got, answer(v, rows, options)) < tolerance["float32"]


@pytest.mark.parametrize("window", [None, 20])
def test_each_of_several_query_tokens_has_its_own_position(
    kernels: DecodeKernels, tolerance: dict[str, float], window: int | None
) -> None:
    v = Variant("float32", "float32", 64, 64, 8, 4, query_tokens=3)
    rows, queries = several_queries(v, [5, 34, 258, 300])
    options = Options(window=window, sinks=SINKS, slopes=SLOPES)
    got = attend(kernels, v, rows, options, queries=queries, tail_tokens=2)
    assert error(got, answers(v, rows, queries, options)) < tolerance["float32"]


def test_steep_slopes_leave_the_nearest_and_gentle_ones_count_far(
    kernels: DecodeKernels, tolerance: dict[str, float], v: Variant
) -> None:
    rows = random_rows(v, [4097])
    options = Options(slopes=np.array([1e4, 50.0, 1e-3, 1e-5, -1e-3, -50.0, 1e-4, 0.0], np.float32))
    got = attend(kernels, v, rows, options)
    assert error(got, answer(v, rows, options)) < tolerance["float32"]
    assert np.array_equal(got[0, 0], rows[0].values[0, -1])


def test_distances_that_16_bits_do_not_hold(kernels: DecodeKernels, tolerance: dict[str, float], v: Variant) -> None:
    """The query is put so far behind its tokens that they lie on both sides of 2^15 before it: no softmax notices."""
    rows, options = random_rows(v, [120]), Options(slopes=SLOPES / 1000)
    got = attend(kernels, v, rows, options, later=(1 << 15) - 60)
    assert error(got, answer(v, rows, options)) < tolerance["float32"]


def test_a_row_is_bitwise_the_same_anywhere_and_slopes_of_0_change_no_bit(kernels: DecodeKernels, v: Variant) -> None:
    v = replace(v, dtype="float16", kv_dtype="float16")
    rows = random_rows(v, [300, 1, 513, 40, 700])
    alone = [attend(kernels, v, [row], Options(slopes=SLOPES), seed=i)[0] for i, row in enumerate(rows)]
    for turn in range(2):
        order = np.roll(range(len(rows)), turn + 1)
        together = attend(kernels, v, [rows[i] for i in order], Options(slopes=SLOPES), seed=turn, tail_tokens=turn)
        for place, i in enumerate(order):
            assert np.array_equal(together[place], alone[i]), f"row {i} at place {place}"
    level = attend(kernels, v, rows, Options(slopes=np.zeros(8)))
    assert np.array_equal(level, attend(kernels, v, rows))
