"""The memory of a graph, its views and its copies: as MLX itself counts when it computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import hypothesis.strategies as st
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings

from cortexmlx.execution.graph_memory import (
    VIEW_KINDS,
    GraphArray,
    dense_strides,
    multiplies_without_copy,
    peak_bytes,
    trace_graph,
    view_strides,
)
from support.effort import examples

BASE = (8, 12, 16, 10)


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
    for begin in range(0, x.shape[0], 64):
        scores = x[begin : begin + 64] @ w @ x.T
        weights = mx.power(2.0, scores - scores.max(axis=-1, keepdims=True))
        parts.append((weights @ x) / (weights @ mx.ones((x.shape[0], 1))))
    return [mx.concatenate(parts)]


def copies(x: mx.array, w: mx.array) -> list[mx.array]:
    """Products of what does not lie dense."""
    return [(x[:, ::2] @ w[::2]) + x[:, 1::2] @ w[:256]]


@pytest.mark.parametrize("function", [chain, branches, stretches, copies])
def test_a_replay_takes_what_mlx_takes(function: Callable[..., Sequence[mx.array]]) -> None:
    """Less where operations are so short that the thread that computes them keeps up with the one that allocates."""
    given = [mx.random.normal((512, 512)) / 32, mx.random.normal((512, 512)) / 32]
    expected = peak_bytes(trace_graph(function, *given))
    least = 0.5 if function is stretches else 0.98
    assert least * expected <= measured(function, given) <= 1.02 * expected


def test_what_is_given_to_be_written_is_written_in_place_and_everything_else_copied() -> None:
    def write(slab: mx.array, new: mx.array) -> list[mx.array]:
        slab[:, 3:5] = new
        return [slab]

    graph = trace_graph(write, mx.zeros((64, 1000)), mx.zeros((64, 2)))
    copied, in_place = peak_bytes(graph), peak_bytes(graph, [graph.arguments[0].name])
    assert copied == 64 * 1000 * 4 and in_place == 0


def test_constants_count() -> None:
    mask = mx.array(np.zeros((256, 256), np.float32))
    assert peak_bytes(trace_graph(lambda x: [x[:1] * 2.0], mask)) < 5_000
    assert peak_bytes(trace_graph(lambda x: [x + mask], mx.zeros((1,)))) == pytest.approx(2 * mask.nbytes, rel=0.01)


def test_no_memory_is_read_to_see_that_a_reshape_copies() -> None:
    side = 1 << 20
    assert view_strides("Reshape", (), (side, side), (1, side), (side * side,)) is None


def copied(make: Any) -> tuple[int, int]:
    """Bytes that MLX takes for what `make` makes of an array, and what it should by `look`."""
    given = mx.ones(BASE)
    mx.eval(given)
    before = mx.get_active_memory()
    made = make(given)
    mx.eval(made)
    took = mx.get_active_memory() - before
    graph = trace_graph(lambda array: [make(array)], mx.zeros(BASE))
    places: dict[str, Any] = {array.name: (array.shape, dense_strides(array.shape)) for array in graph.arguments}
    size = 0
    for operation in graph.operations:
        assert operation.kind in VIEW_KINDS
        (array,) = operation.outputs
        shape, strides = places[operation.inputs[0]]
        seen = view_strides(operation.kind, operation.arguments, shape, strides, array.shape)
        size = array.nbytes if seen is None else size
        places[array.name] = (array.shape, seen or dense_strides(array.shape))
    return took, size


@given(st.data())
@settings(max_examples=examples(60))
def test_what_is_a_view_and_what_is_a_copy_is_as_in_mlx(data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(4)))
    shape = [BASE[axis] for axis in order]
    begin = data.draw(st.sampled_from([0, 2]))
    joined = data.draw(st.integers(0, 2))
    wide = data.draw(st.booleans())

    def make(array: mx.array) -> mx.array:
        array = array.transpose(order)[:, begin:]
        shape[1] = array.shape[1]
        merged = [*shape[:joined], shape[joined] * shape[joined + 1], *shape[joined + 2 :]]
        array = array.reshape(merged)
        return mx.broadcast_to(array[None], (3, *merged)) if wide else array

    took, size = copied(make)
    assert (took > 1024) == (size > 0), "MLX may take a larger buffer that it has kept"
    assert size <= took + 1024


def test_a_product_takes_matrices_that_lie_dense_or_transposed() -> None:
    for shape, strides in (
        ((4, 6), (6, 1)),
        ((4, 6), (1, 4)),
        ((3, 4, 6), (24, 6, 1)),
        ((1, 6), (99, 1)),
        ((5,), (3,)),
    ):
        assert multiplies_without_copy(shape, strides)
    assert multiplies_without_copy((6, 1), (1, 99))
    assert not multiplies_without_copy((4, 6), (12, 1)) and not multiplies_without_copy((4, 6), (1, 8))


def test_a_trace_has_what_goes_in_what_comes_out_and_all_between() -> None:
    graph = trace_graph(lambda x, w: [mx.softmax(x @ w, axis=-1)], mx.zeros((4, 8)), mx.zeros((8, 2), mx.float16))
    kinds = [operation.kind for operation in graph.operations]
    assert "Matmul" in kinds and kinds[-1] == "Softmax"
    assert [(a.shape, a.nbytes) for a in graph.arguments] == [((4, 8), 128), ((8, 2), 32)]
    (last,) = graph.operations[-1].outputs
    assert graph.results == [last.name] and last == GraphArray(last.name, (4, 2), 4)


def test_nothing_is_computed_and_no_argument_either() -> None:
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    wide = mx.zeros((1 << 14, 1 << 14))
    trace_graph(lambda x: [(x @ x).sum()], wide)
    assert mx.get_peak_memory() - before < 1 << 20


def test_what_mlx_does_not_export_is_traced_as_what_does_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    real = mx.contiguous
    graph = trace_graph(lambda x: [mx.contiguous(x.T)], mx.zeros((4, 8)))
    assert graph.operations[-1].outputs[0].shape == (8, 4)
    assert mx.contiguous is real
    with pytest.raises(ZeroDivisionError):
        trace_graph(lambda x: [x / (1 // 0)], mx.zeros((4,)))
    assert mx.contiguous is real
