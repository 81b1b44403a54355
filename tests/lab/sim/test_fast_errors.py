"""`metal::fast::` with the errors that Metal's specification allows it."""

from functools import cache

import mlx.core as mx
import numpy as np
import pytest

from cortexmlx.metal.lab import sim
from support.kernels.sim_tools import launch

I = "uint i = thread_position_in_grid.x; "  # noqa: E741
N = 512
_RANDOM = np.random.default_rng(0)
SMALL = _RANDOM.uniform(-3.1, 3.1, N)
AROUND_ONE, POSITIVE = _RANDOM.uniform(0.5, 2.0, N), np.exp(_RANDOM.uniform(1, 80, N)) ** _RANDOM.choice([-1, 1], N)
UNIT = _RANDOM.uniform(-1, 1, N)

UNITS = {
    "exp": (np.exp, _RANDOM.uniform(-80, 80, N), lambda x: 3 + np.floor(np.abs(2 * x))),
    "exp2": (np.exp2, _RANDOM.uniform(-120, 120, N), lambda x: 3 + np.floor(np.abs(2 * x))),
    "log": (np.log, POSITIVE, lambda x: 3),
    "log2": (np.log2, POSITIVE, lambda x: 2),
    "rsqrt": (lambda x: x**-0.5, POSITIVE, lambda x: 2),
    "asin": (np.arcsin, UNIT, lambda x: 5),
    "acos": (np.arccos, UNIT, lambda x: 5),
    "atan": (np.arctan, SMALL, lambda x: 5),
}
"""Functions whose error is so many units in the last place of the result."""

ABSOLUTE = {
    "sin": (np.sin, SMALL, 2**-13),
    "cos": (np.cos, SMALL, 2**-13),
    "sinpi": (lambda x: np.sin(np.pi * x), UNIT, 2**-13),
    "cospi": (lambda x: np.cos(np.pi * x), UNIT, 2**-13),
    "log": (np.log, AROUND_ONE, 2**-21),
    "log2": (np.log2, AROUND_ONE, 2**-22),
}
"""Functions whose error is absolute, and how large it is."""


def fast(expression: str, values: object, errors: bool = True) -> np.ndarray:
    """What a kernel computes of x, element by element."""
    with sim.options(fast_errors=errors):
        y, _ = launch(I + f"y[i] = {expression};", x=mx.array(np.asarray(values, np.float32)), count=len(values))
    return np.array(y)


def of(values: np.ndarray) -> np.ndarray:
    """The floats that the kernel gets, as float64."""
    return values.astype(np.float32).astype(np.float64)


@cache
def every_result() -> dict[str, np.ndarray]:
    """The results of all functions of UNITS and ABSOLUTE, from one launch."""
    cases = {**UNITS, **{f"{name} of ABSOLUTE": case for name, case in ABSOLUTE.items()}}
    body = "".join(f"y[i + {n * N}] = fast::{name.split()[0]}(x[i + {n * N}]); " for n, name in enumerate(cases))
    given = np.concatenate([values for _, values, _ in cases.values()]).astype(np.float32)
    with sim.options(fast_errors=True):
        y, _ = launch(I + body, x=mx.array(given), count=N, outputs=len(given))
    return dict(zip(cases, np.array(y).reshape(-1, N), strict=True))


@pytest.mark.parametrize("name", UNITS)
def test_an_error_in_units_is_no_larger_than_allowed_and_nearly_so_somewhere(name: str) -> None:
    function, values, allowed = UNITS[name]
    exact = function(of(values))
    off = np.abs(every_result()[name] - exact) / np.spacing(np.abs(exact).astype(np.float32))
    share = off / allowed(of(values))
    assert share.max() <= 1 and share.max() > 0.4 and share.mean() > 0.2


@pytest.mark.parametrize("name", ABSOLUTE)
def test_an_absolute_error_is_no_larger_than_allowed_and_nearly_so_somewhere(name: str) -> None:
    function, values, allowed = ABSOLUTE[name]
    share = np.abs(every_result()[f"{name} of ABSOLUTE"] - function(of(values))) / allowed
    assert share.max() <= 1 and share.max() > 0.8 and share.mean() > 0.4


def test_quotients_err_by_two_and_a_half_units_and_inverses_by_one() -> None:
    for above, allowed in ((3.0, 2.5), (1.0, 1.0)):
        exact = above / of(POSITIVE)
        off = np.abs(fast(f"fast::divide({above}f, x[i])", POSITIVE) - exact) / np.spacing(exact.astype(np.float32))
        assert off.max() <= allowed and off.max() > 0.8 * allowed


def test_divisors_and_logarithms_outside_their_ranges() -> None:
    beyond = [2.0**-127, -(2.0**-127), 2.0**127, -(2.0**127), np.inf]
    assert fast("fast::divide(2.0f, x[i])", beyond).tolist() == [np.inf, -np.inf, 0, 0, 0]
    for name in ("log", "log2", "log10"):
        assert np.isnan(fast(f"fast::{name}(x[i])", [0.0, -1.0])).all()


def test_errors_leave_infinities_zeros_and_precise_functions_alone() -> None:
    assert fast("fast::exp(x[i])", [-np.inf, np.inf, -200.0, 200.0]).tolist() == [0, np.inf, 0, np.inf]
    assert fast("fast::exp(x[i])", [-87.6]).tolist() == [0], "subnormal results are flushed"
    assert fast("fast::sqrt(x[i])", [0.0, np.inf]).tolist() == [0, np.inf]
    for spelling in ("", "metal::", "precise::"):
        text = f"{spelling}exp(x[i]) + {spelling}sin(x[i])"
        assert np.array_equal(fast(text, SMALL), fast(text, SMALL, errors=False))


def test_the_same_argument_has_the_same_error_in_every_launch_and_none_without_the_option() -> None:
    first, again = fast("fast::exp(x[i])", SMALL), fast(f"fast::exp(x[{N - 1} - i])", SMALL[::-1])
    assert np.array_equal(first, again)
    plain = fast("fast::exp(x[i])", SMALL, errors=False)
    assert np.array_equal(plain, fast("precise::exp(x[i])", SMALL, errors=False)) and not np.array_equal(first, plain)


def test_what_is_computed_in_steps_and_in_vectors_errs_as_its_steps_do() -> None:
    one = fast("fast::exp(x[i])", SMALL)
    assert np.array_equal(fast("fast::exp(float2(0.0f, x[i])).y", SMALL), one)
    both = fast("0.5f * (fast::exp(x[i]) + fast::exp(-x[i]))", SMALL)
    assert np.array_equal(fast("fast::cosh(x[i])", SMALL), both)
    assert np.array_equal(
        fast("fast::pow(x[i], 2.0f)", POSITIVE), fast("fast::exp2(2.0f * fast::log2(x[i]))", POSITIVE)
    )
    both = fast("fast::sin(x[i]) + 3.0f * fast::cos(x[i])", SMALL)
    assert np.array_equal(fast("0.0f; float c; y[i] = fast::sincos(x[i], c); y[i] += 3.0f * c", SMALL), both)
