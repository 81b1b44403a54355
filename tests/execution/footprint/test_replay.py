"""The memory that an evaluation takes at most, beside what MLX counts when it is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np
import pytest

from cortexmlx.execution.footprint.graph import trace
from cortexmlx.execution.footprint.replay import peak_bytes


def measured(function: Callable[..., Sequence[mx.array]], given: Sequence[mx.array]) -> int:
    """What MLX takes at most for the results, beside what is given."""
    mx.eval(given)
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    results = function(*given)
    mx.eval(results)
    return int(mx.get_peak_memory()) - before


def chain(x: mx.array, w: mx.array) -> list[mx.array]:
    """Products one after the other: no more than two results at once, or all that are on their way."""
    for _ in range(12):
        x = mx.tanh(x @ w) + 1.0
    return [x]


def branches(x: mx.array, w: mx.array) -> list[mx.array]:
    """A residual and two products of one array, as in a layer with a gate."""
    for _ in range(4):
        x = x + (mx.sigmoid(x @ w) * (x @ w.T)) @ w
    return [x]


def stretches(x: mx.array, w: mx.array) -> list[mx.array]:
    """Scores of many queries over all keys, a few queries at a time."""
    parts = []
    for begin in range(0, x.shape[0], 128):
        scores = x[begin : begin + 128] @ w @ x.T
        weights = mx.power(2.0, scores - scores.max(axis=-1, keepdims=True))
        parts.append((weights @ x) / (weights @ mx.ones((x.shape[0], 1))))
    return [mx.concatenate(parts)]


def copies(x: mx.array, w: mx.array) -> list[mx.array]:
    """Products of what does not lie dense."""
    return [(x[:, ::2] @ w[::2]) + x[:, 1::2] @ w[:512]]


@pytest.mark.parametrize("function", [chain, branches, stretches, copies])
def test_a_replay_takes_what_mlx_takes(function: Callable[..., Sequence[mx.array]]) -> None:
    """Less where operations are so short that the thread that computes them keeps up with the one that allocates."""
    given = [mx.random.normal((1024, 1024)) / 64, mx.random.normal((1024, 1024)) / 64]
    expected = peak_bytes(trace(function, *given))
    least = 0.5 if function is stretches else 0.98
    assert least * expected <= measured(function, given) <= 1.02 * expected


def test_what_is_given_to_be_written_is_written_in_place_and_everything_else_copied() -> None:
    def write(slab: mx.array, new: mx.array) -> list[mx.array]:
        slab[:, 3:5] = new
        return [slab]

    graph = trace(write, mx.zeros((64, 1000)), mx.zeros((64, 2)))
    copied, in_place = peak_bytes(graph), peak_bytes(graph, [graph.given[0].name])
    assert copied == 64 * 1000 * 4 and in_place == 0


def test_constants_count() -> None:
    mask = mx.array(np.zeros((256, 256), np.float32))
    assert peak_bytes(trace(lambda x: [x[:1] * 2.0], mask)) < 5_000
    assert peak_bytes(trace(lambda x: [x + mask], mx.zeros((1,)))) == pytest.approx(2 * mask.nbytes, rel=0.01)
