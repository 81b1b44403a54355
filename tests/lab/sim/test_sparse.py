"""Inputs larger than memory: offsets beyond 32 bits are reached, and those that overflow are caught."""

import mlx.core as mx
import pytest

from cortexmlx.errors import KernelFault
from cortexmlx.metal.lab import sim


def test_an_element_beyond_four_gigabytes_is_reached_with_a_64_bit_offset():
    big = sim.SparseArray((5, 1 << 30), mx.bfloat16)
    big.put((4, 5), mx.arange(1, 9).astype(mx.bfloat16))
    kernel = sim.metal_kernel(
        name="far",
        input_names=["big"],
        output_names=["y"],
        source="uint i = thread_position_in_grid.x; y[i] = big[4 * size_t(big_shape[1]) + 5 + i] + big[i];",
    )
    size = {"grid": (8, 1, 1), "threadgroup": (8, 1, 1), "output_shapes": [(8,)], "output_dtypes": [mx.bfloat16]}
    for checked in (True, False):
        with sim.options(checked=checked):
            (y,) = kernel(inputs=[big], **size)
        assert y.tolist() == list(range(1, 9))
    assert kernel.last_report.kernel == "far"


def test_a_32_bit_offset_into_a_large_buffer_is_caught():
    big = sim.SparseArray((1 << 16, 1 << 16), mx.float16)
    kernel = sim.metal_kernel(
        name="near",
        input_names=["big"],
        output_names=["y"],
        source="int row = 40000 + int(thread_position_in_grid.x); y[thread_position_in_grid.x] = big[row * 100000];",
    )
    with pytest.raises(KernelFault, match="product overflows 'int'"):
        kernel(inputs=[big], grid=(8, 1, 1), threadgroup=(8, 1, 1), output_shapes=[(8,)], output_dtypes=[mx.float16])


def test_pieces_lie_where_their_index_says_and_nowhere_else():
    big = sim.SparseArray((4, 1 << 22), mx.float32)
    assert (big.ndim, big.size, big.nbytes, big.strides()) == (2, 1 << 24, 1 << 26, [1 << 22, 1])
    big.put((3, 5), mx.array([[1, 2], [3, 4]]))
    [(offset, bits)] = big.pieces
    assert offset == 4 * (3 * (1 << 22) + 5) and bits.tolist() == [1.0, 2.0, 3.0, 4.0] and bits.dtype == "float32"
    for index, count in (((3, (1 << 22) - 1), 2), ((4, 0), 1), ((0, -1), 1)):
        with pytest.raises(IndexError, match="do not fit"):
            big.put(index, mx.zeros((count,)))


@pytest.mark.parametrize("shape", [(16,), (1 << 20,), (1 << 35,)])
def test_an_array_that_needs_no_sparseness_or_has_no_room_is_refused(shape):
    with pytest.raises(ValueError, match="a sparse array has more than 8388608 and less than 34359738368 bytes"):
        sim.SparseArray(shape, mx.float32)
