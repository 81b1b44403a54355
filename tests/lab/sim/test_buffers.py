"""Arguments as MLX binds them: a contiguous slice lies where it does in its array, and is aligned as it is there."""

import mlx.core as mx
import pytest

from cortexmlx.errors import KernelFault
from cortexmlx.metal.lab import sim
from cortexmlx.metal.lab.sim.buffers import offset_of

VECTORS = "uint i = thread_position_in_grid.x; *(device {0}4*)(y + 4 * i) = *(const device {0}4*)(x + 4 * i);"


def vector_copy(x, contiguous=True):
    element = {mx.float32: "float", mx.float16: "half", mx.bfloat16: "bfloat"}[x.dtype]
    kernel = sim.metal_kernel(
        name="copy",
        input_names=["x"],
        output_names=["y"],
        source=VECTORS.format(element),
        ensure_row_contiguous=contiguous,
    )
    (y,) = kernel(inputs=[x], grid=(4, 1, 1), threadgroup=(4, 1, 1), output_shapes=[(16,)], output_dtypes=[x.dtype])
    return y


@pytest.mark.parametrize(
    ("dtype", "contiguous"), [(mx.float32, True), (mx.float16, False), (mx.bfloat16, True)], ids=str
)
def test_a_slice_has_the_alignment_of_its_place_in_the_array(dtype, contiguous):
    whole = mx.arange(64).astype(dtype)
    for start in (0, 4, 8, 24):
        assert mx.array_equal(vector_copy(whole[start : start + 16], contiguous), whole[start : start + 16])
    for start in (1, 2, 3, 33):
        with pytest.raises(KernelFault, match="address"):
            vector_copy(whole[start : start + 16], contiguous)


def test_a_row_of_a_matrix_lies_where_the_rows_before_it_end():
    for columns, aligned in ((16, True), (20, True), (18, False), (17, False)):
        matrix = mx.arange(4 * columns).astype(mx.float32).reshape(4, columns)
        if aligned:
            assert mx.array_equal(vector_copy(matrix[1:2, :16]), matrix[1, :16])
        else:
            with pytest.raises(KernelFault, match="address"):
                vector_copy(matrix[1:2, :16])


def test_what_mlx_copies_first_is_aligned():
    whole = mx.arange(64).astype(mx.float32)
    assert mx.array_equal(vector_copy(whole[1:33:2]), whole[1:33:2]), "not contiguous, so MLX makes a new array of it"
    assert mx.array_equal(vector_copy(whole[1:17] + 0), whole[1:17])


@pytest.mark.parametrize("contiguous", [True, False])
def test_a_reversed_view_is_given_by_its_first_element(contiguous):
    matrix = mx.arange(24).astype(mx.float32).reshape(4, 6)
    view = matrix[::-1, ::2]
    kernel = sim.metal_kernel(
        name="reversed",
        input_names=["x"],
        output_names=["y"],
        source="uint i = thread_position_in_grid.x; y[i] = x[(i / 3) * x_strides[0] + (i % 3) * x_strides[1]];",
        ensure_row_contiguous=contiguous,
    )
    size = {"grid": (12, 1, 1), "threadgroup": (12, 1, 1), "output_shapes": [(4, 3)], "output_dtypes": [mx.float32]}
    (y,) = kernel(inputs=[view], **size)
    assert mx.array_equal(y, view)


def test_an_array_of_its_own_has_no_offset_and_a_slice_has_its_own():
    kept = [mx.zeros((n,)) for n in range(1, 200)]
    assert {offset_of(x) for x in kept} == {0}
    whole = mx.arange(100).astype(mx.float16)
    assert [offset_of(whole[n:]) % 16 for n in range(20)] == [2 * n % 16 for n in range(20)]
