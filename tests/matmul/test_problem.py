"""The problems of the self-check: MLX's own dequantization says what their arrays stand for."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from cortexmlx.matmul.selfcheck import EXPERTS, draw_weights, make_mlx_weights, make_problem
from cortexmlx.metal.matmul.shape import EXPERT_ROWS, FORMATS, OUTPUTS, MatmulShape


@pytest.mark.parametrize(("mode", "bits", "group"), FORMATS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_weights_stand_for_what_is_wanted(mode: str, bits: int, group: int, dtype: str) -> None:
    shape = MatmulShape(dtype, mode, bits, group, 5 * group, 9)
    parts, meant = draw_weights(shape, np.random.default_rng(3))
    weights = make_mlx_weights(shape, parts)
    wide = [part if part.dtype in (mx.uint8, mx.uint32) else part.astype(mx.float32) for part in weights.arrays]
    numbers = mx.dequantize(*wide, group_size=group, bits=bits, mode=mode).astype(mx.float32)
    assert np.array_equal(np.array(numbers), meant), "no dtype rounds a scale or a bias"
    assert [part.shape for part in weights.arrays] == [
        p.shape for p in mx.quantize(mx.zeros(meant.shape), group, bits, mode)
    ]


@pytest.mark.parametrize("inputs", [64, 256, 4096])
def test_a_problem_is_for_the_kernel_of_its_shape(inputs: int) -> None:
    shape = MatmulShape("float16", "affine", 4, 64, inputs, 5000)
    problem = make_problem(shape, 11)
    assert problem.shape.slices == shape.slices and problem.shape.outputs % OUTPUTS == 1
    assert problem.shape.inputs // 64 % shape.slices or shape.slices == 1, "not all slices have as many groups"
    assert problem.expected.shape == (11, OUTPUTS + 1)
    assert 0.1 < np.abs(problem.expected).max() < 4
    product = np.array(problem.rows.astype(mx.float32))
    assert not np.array_equal(product[0], product[1])


def test_experts_have_more_pairs_than_are_computed_together_some_and_none() -> None:
    problem = make_problem(MatmulShape("float16", "affine", 4, 64, 256, 64, experts=99), 16)
    assert problem.experts is not None and tuple(problem.experts.tolist()) == EXPERTS
    assert EXPERTS.count(0) > 2 * EXPERT_ROWS and set(EXPERTS) < set(range(problem.shape.experts or 0))
    assert EXPERTS.count(3) > 1 and EXPERTS[EXPERTS.index(3) + 1] != 3
