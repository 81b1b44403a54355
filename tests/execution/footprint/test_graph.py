"""A trace has every operation with its shapes, and computes nothing."""

from __future__ import annotations

import mlx.core as mx
import pytest

from cortexmlx.execution.footprint.graph import Array, trace


def test_a_trace_has_what_goes_in_what_comes_out_and_all_between() -> None:
    graph = trace(lambda x, w: [mx.softmax(x @ w, axis=-1)], mx.zeros((4, 8)), mx.zeros((8, 2), mx.float16))
    kinds = [operation.kind for operation in graph.operations]
    assert "Matmul" in kinds and kinds[-1] == "Softmax"
    assert [(a.shape, a.nbytes) for a in graph.given] == [((4, 8), 128), ((8, 2), 32)]
    (last,) = graph.operations[-1].makes
    assert graph.results == [last.name] and last == Array(last.name, (4, 2), 4)


def test_constants_are_told_apart_from_what_is_given() -> None:
    mask = mx.array([[0.0, 1.0, 2.0]])
    graph = trace(lambda x: [x + mask], mx.zeros((5, 3)))
    assert [a.shape for a in graph.constants] == [(1, 3)]


def test_nothing_is_computed_and_no_argument_either() -> None:
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    wide = mx.zeros((1 << 14, 1 << 14))
    trace(lambda x: [(x @ x).sum()], wide)
    assert mx.get_peak_memory() - before < 1 << 20


def test_what_mlx_does_not_export_is_traced_as_what_does_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    real = mx.contiguous
    graph = trace(lambda x: [mx.contiguous(x.T)], mx.zeros((4, 8)))
    assert graph.operations[-1].makes[0].shape == (8, 4)
    assert mx.contiguous is real
    with pytest.raises(ZeroDivisionError):
        trace(lambda x: [x / (1 // 0)], mx.zeros((4,)))
    assert mx.contiguous is real
