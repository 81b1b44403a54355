"""The full matrix of prefill attention against float64. Slow on the simulator: minutes. On a GPU it runs with
`-m metal` or `-m cuda`, as the other cases do (`conftest.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from cortexmlx.metal.kernels import KernelFactory
from cortexmlx.metal.prefill import PrefillKernel, PrefillVariant, refusal
from support.kernels.paged_problem import NONE, Options, error
from support.kernels.prefill_problem import KV_HEADS, Stretch, answers, attend, random_prompts

pytestmark = pytest.mark.slow

DTYPES = ("float32", "float16", "bfloat16")
STRETCHES = (Stretch(0, 0, 33), Stretch(1, 60, 130), Stretch(1, 40, 60), Stretch(2, 200, 201))
Judge = Callable[..., None]


@pytest.fixture(scope="module")
def judge(factory: KernelFactory, tolerance: dict[str, float]) -> Judge:
    """Asserts that the kernel of a variant answers `STRETCHES`, scattered and in runs."""
    kernel = PrefillKernel(factory)

    def judge(v: PrefillVariant, options: Options = NONE) -> None:
        assert refusal(v) is None
        prompts = random_prompts(v, [33, 130, 201])
        for runs in (False, True):
            got = attend(kernel, v, prompts, STRETCHES, options, runs=runs)
            assert error(got, answers(v, prompts, STRETCHES, options)) < tolerance[v.dtype]

    return judge


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", (64, 80, 96, 112, 128, 192, 256))
def test_every_head_dim_and_dtype(judge: Judge, dim: int, dtype: str) -> None:
    if dtype == "float32" and dim > 128:
        return  # does not fit threadgroup memory: `test_a_refusal_says_why`
    for window in (None, 1, 50):
        judge(PrefillVariant(dtype, dtype, dim, dim, 32, 4), Options(window=window))


@pytest.mark.parametrize("dim", range(8, 257, 8))
def test_every_head_dim_that_matrices_can_cut(judge: Judge, dim: int) -> None:
    judge(PrefillVariant("float16", "bfloat16", dim, 8 + dim * 7 % 256 // 8 * 8, 16, 2))


@pytest.mark.parametrize("group", (1, 2, 3, 4, 5, 6, 7, 8, 12, 16))
def test_every_number_of_query_heads(judge: Judge, group: int) -> None:
    judge(PrefillVariant("float16", "float16", 256, 256, 32, group))
    judge(PrefillVariant("float16", "float16", 64, 64, 32, group), Options(window=40))


@pytest.mark.parametrize("block_size", (1, 4, 8, 16, 24, 32, 64, 128))
def test_every_size_of_blocks(judge: Judge, block_size: int) -> None:
    judge(PrefillVariant("float16", "float16", 96, 96, block_size, 4), Options(window=60))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_every_option(judge: Judge, dtype: str, softcap: float | None, sinks: bool) -> None:
    v = PrefillVariant(dtype, dtype, 64, 64, 32, 4)
    heights = np.linspace(-3, 6, KV_HEADS * v.group).astype(np.float32) if sinks else None
    for window in (None, 30):
        judge(v, Options(softcap=softcap, sinks=heights, window=window))
