"""Several query tokens per row: a row's newest tokens, each of which sees what was before it and itself.

The judge is attention in float64 of one query over the row as it was when that token was its newest.
"""

from __future__ import annotations

import numpy as np
import pytest

from cortexmlx.metal.kernels import DecodeKernels
from cortexmlx.metal.lab import sim
from cortexmlx.metal.rules import Variant, refusal
from cortexmlx.metal.shape import Kernel
from support.kernels.paged_problem import Options, answers, attend, error, several_queries

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
