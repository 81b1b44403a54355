"""The reduce kernel on partial results made by hand: what no ordinary context reaches."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from cortexmlx.metal.kernels import REDUCE_ENTRY, REDUCE_SIMDGROUPS, KernelFactory, kernel_text

DIM = 64


def reduced(factory: KernelFactory, partials: np.ndarray, sink: float | None) -> np.ndarray:
    """The reduce kernel's answer for one row and one head from `partials` `[items, DIM + 2]`."""
    kernel = factory(
        name="cortex_paged_reduce",
        input_names=["partials", "decode_plan", "head_sinks"],
        output_names=["attended"],
        source=REDUCE_ENTRY,
        header=kernel_text("paged_reduce.metal"),
    )
    plan = np.zeros(8, np.int32)
    plan[:2] = 0, len(partials)
    numbers = {"VALUE_DIM": DIM, "SIMDGROUPS": REDUCE_SIMDGROUPS, "TOKENS": 1, "SINKS": sink is not None}
    template = [("T", mx.float32), *numbers.items()]
    (out,) = kernel(
        inputs=[mx.array(partials[:, None].astype(np.float32)), mx.array(plan), mx.full((8,), sink or 0.0)],
        template=template,
        grid=(32 * REDUCE_SIMDGROUPS, 1, 1),
        threadgroup=(32 * REDUCE_SIMDGROUPS, 1, 1),
        output_shapes=[(1, 1, 1, DIM)],
        output_dtypes=[mx.float32],
    )
    return np.array(out, np.float64).reshape(DIM)


@pytest.mark.parametrize("sink", [None, -50.0, 190.0, 260.0])
@pytest.mark.parametrize(("items", "peak"), [(33, 32), (34, 33), (70, 64), (70, 5)])
def test_the_highest_score_may_lie_in_any_partition(
    factory: KernelFactory, items: int, peak: int, sink: float | None
) -> None:
    """More partitions than lanes, and one of them so far above the rest that a maximum without it overflows."""
    rng = np.random.default_rng(items)
    sums, highest, totals = rng.normal(size=(items, DIM)), np.zeros(items), rng.uniform(1, 9, items)
    highest[peak] = 200.0
    partials = np.concatenate([sums, highest[:, None], totals[:, None]], axis=1).astype(np.float32)
    exact = partials.astype(np.float64)
    top = max(exact[:, DIM].max(), -np.inf if sink is None else sink)
    weights = np.exp(exact[:, DIM] - top)
    whole = (weights * exact[:, DIM + 1]).sum() + (0.0 if sink is None else np.exp(sink - top))
    np.testing.assert_allclose(reduced(factory, partials, sink), weights @ exact[:, :DIM] / whole, rtol=1e-5, atol=1e-6)
