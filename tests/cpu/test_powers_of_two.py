"""Powers of two against float64."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from cortexmlx.cpu.powers_of_two import LOG2_E, exp2

EPSILON = {"float32": 2**-23, "float16": 2**-10, "bfloat16": 2**-7}


@pytest.mark.parametrize("dtype", EPSILON)
def test_they_are_float64s_within_two_last_digits(dtype: str) -> None:
    exponents = mx.array(np.random.default_rng(0).uniform(-14, 14, 4096)).astype(getattr(mx, dtype))
    found = exp2(exponents)
    wanted = np.exp2(np.array(exponents.astype(mx.float32), float))
    errors = np.abs(np.array(found.astype(mx.float32), float) / wanted - 1)
    assert found.dtype == getattr(mx, dtype) and errors.max() <= 2 * EPSILON[dtype]


def test_with_the_factor_they_are_exponentials() -> None:
    numbers = np.random.default_rng(1).uniform(-20, 20, 4096).astype(np.float32)
    found = np.array(exp2(mx.array(numbers) * LOG2_E), float)
    errors = np.abs(found / np.exp(numbers.astype(float)) - 1)
    assert errors.max() < 4e-6, "a rounded exponent of 29 is off by 1e-6, and so is its power"


def test_the_limits_are_those_of_the_mathematics() -> None:
    limits = exp2(mx.array([-mx.inf, 0.0, -0.0, mx.inf, -200.0, 200.0]))
    assert np.array(limits).tolist() == [0.0, 1.0, 1.0, np.inf, 0.0, np.inf]
    assert np.isnan(np.array(exp2(mx.array([mx.nan])))).all()
