"""SwiGLU by powers of two: as exact as mlx-lm's, for the engine's own steps only."""

from __future__ import annotations

import threading

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import activations, llama

from cortexmlx.cpu import swiglu
from cortexmlx.mlx_lm.modules import replace_function

on_cpu = pytest.mark.skipif(mx.default_device() != mx.cpu, reason="for MLX's CPU build")
PLAIN = getattr(activations.swiglu, "replaced", activations.swiglu)


def numbers(*shape: int) -> mx.array:
    return mx.array(np.random.default_rng(sum(shape)).normal(scale=6.0, size=shape).astype(np.float32))


def test_it_agrees_with_float64_and_is_no_worse_than_the_original() -> None:
    gate, x = numbers(4, 1024), numbers(4, 1025)[:, :1024]
    g = np.array(gate, dtype=np.float64)
    wanted = g / (1 + np.exp(-g)) * np.array(x, dtype=np.float64)
    errors = [np.abs(np.array(f(gate, x)) - wanted).max() / np.abs(wanted).max() for f in (swiglu.swiglu, PLAIN)]
    assert errors[0] < 3e-7 and errors[0] <= 2 * errors[1]


def test_its_limits_are_those_of_the_original() -> None:
    gate = mx.array([0.0, -0.0, -1e3, 1e3, -3e38, 3e38, float("inf"), float("-inf"), float("nan")])
    one = mx.ones_like(gate)
    assert np.array_equal(np.array(swiglu.swiglu(gate, one)), np.array(PLAIN(gate, one)), equal_nan=True)


@on_cpu
def test_only_the_engines_own_steps_take_it() -> None:
    originals: list[int] = []
    choose = swiglu._make_swiglu(lambda gate, x: originals.append(gate.size) or gate)
    large, small = mx.ones((8, swiglu.WORTHWHILE // 8)), mx.ones((8,))
    choose(large, large)
    assert originals == [large.size]
    with swiglu.use_powers_of_two():
        assert np.allclose(np.array(choose(large, large)), 1 / (1 + np.exp(-1)))
        assert originals == [large.size]
        choose(small, small)
        choose(large.astype(mx.float16), large.astype(mx.float16))
        other = threading.Thread(target=choose, args=(large, large))
        other.start()
        other.join()
    choose(large, large)
    assert originals == [large.size, small.size, large.size, large.size, large.size]


def test_replacing_twice_changes_nothing() -> None:
    swiglu.install()
    before = llama.swiglu
    replace_function("activations", "swiglu", lambda original: pytest.fail("replaced again"))
    assert llama.swiglu is before and llama.swiglu is activations.swiglu
