"""Which operations only look at memory in another way: as MLX's own count of its memory says."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings

from cortexmlx.execution.footprint.graph import trace
from cortexmlx.execution.footprint.layout import LOOKS, dense, is_dense, look, multiplies_in_place
from support.effort import examples

BASE = (8, 12, 16, 10)


def copied(make: Any) -> tuple[int, int]:
    """Bytes that MLX takes for what `make` makes of an array, and what it should by `look`."""
    given = mx.ones(BASE)
    mx.eval(given)
    before = mx.get_active_memory()
    made = make(given)
    mx.eval(made)
    took = mx.get_active_memory() - before
    graph = trace(lambda array: [make(array)], mx.zeros(BASE))
    places: dict[str, Any] = {array.name: (array.shape, dense(array.shape)) for array in graph.given}
    size = 0
    for operation in graph.operations:
        assert operation.kind in LOOKS
        (array,) = operation.makes
        shape, strides = places[operation.takes[0]]
        seen = look(operation.kind, operation.settings, shape, strides, array.shape)
        size = array.nbytes if seen is None else size
        places[array.name] = (array.shape, seen or dense(array.shape))
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


@pytest.mark.parametrize(
    ("shape", "strides", "plain"),
    [
        ((4, 6), (6, 1), True),
        ((4, 6), (1, 4), True),
        ((3, 4, 6), (24, 6, 1), True),
        ((4, 6), (12, 1), False),
        ((4, 6), (1, 8), False),
        ((1, 6), (99, 1), True),
        ((6, 1), (1, 99), True),
        ((5,), (3,), True),
    ],
)
def test_a_product_takes_matrices_that_lie_dense_or_transposed(shape: Any, strides: Any, plain: bool) -> None:
    assert multiplies_in_place(shape, strides) is plain


def test_dense_is_what_numpy_calls_contiguous() -> None:
    for shape in ((2, 3, 4), (1, 5), (7,), (2, 1, 3)):
        array = np.zeros(shape, np.int8)
        assert dense(shape) == array.strides and is_dense(shape, dense(shape))
    assert not is_dense((2, 3), (1, 2)) and is_dense((1, 3), (77, 1))
