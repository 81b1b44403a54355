"""What the check of the tail's kernel calls right is what MLX's own operations give."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from cortexmlx.attention.selfcheck_problems import NUM_NEAR_ROWS, make_tail_problem
from cortexmlx.metal.tail_write import HeadNorm, RopeParameters, TailWriteVariant


@pytest.mark.parametrize(
    "variant",
    [
        TailWriteVariant("float32", 16, 8, RopeParameters(16, False, 10000.0), query_norm=True, key_norm=False),
        TailWriteVariant("float32", 24, 24, RopeParameters(8, True, 500.0, 0.5), query_norm=False, key_norm=True),
        TailWriteVariant("float32", 32, 32, RopeParameters(32, False, None), query_norm=True, key_norm=True),
    ],
    ids=lambda v: v.label,
)
def test_the_answer_is_that_of_mlx(variant: TailWriteVariant) -> None:
    problem = make_tail_problem(variant)
    new, turning = problem.new, variant.rope
    [_, column, _, *positions] = problem.packed_positions[:7].tolist()

    def by_mlx(given: mx.array, norm: HeadNorm | None) -> mx.array:
        x = given if norm is None else mx.fast.rms_norm(given, norm.weight, norm.eps)
        rest = {"base": turning.base, "scale": turning.scale, "freqs": new.frequencies}
        offset = mx.array(positions)
        return mx.fast.rope(x[:, :, None], turning.dims, traditional=turning.traditional, offset=offset, **rest)

    queries, keys, values = problem.expected
    for wanted, theirs in (
        (queries, by_mlx(new.queries, new.query_norm)),
        (keys[:, :, [column]], by_mlx(new.keys, new.key_norm)),
    ):
        near, far = np.split(np.abs(wanted - np.array(theirs)), [NUM_NEAR_ROWS])
        assert near.max() < 2e-5 and far.max() < 0.02 and positions[NUM_NEAR_ROWS] > 2**16
    assert np.array_equal(values[:, :, column], np.array(new.values))
    for wanted, before in zip((keys, values), problem.tail, strict=True):
        others = [c for c in range(problem.columns) if c != column]
        assert np.array_equal(wanted[:, :, others], np.array(before)[:, :, others])
