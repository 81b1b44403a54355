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


def test_the_same_argument_has_the_same_error_in_every_launch_and_none_without_the_option() -> None:
    first, again = fast("fast::exp(x[i])", SMALL), fast(f"fast::exp(x[{N - 1} - i])", SMALL[::-1])
    assert np.array_equal(first, again)
    plain = fast("fast::exp(x[i])", SMALL, errors=False)
    assert np.array_equal(plain, fast("precise::exp(x[i])", SMALL, errors=False)) and not np.array_equal(first, plain)
