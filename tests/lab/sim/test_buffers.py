"""What a launch is given: buffers at MLX's addresses, inputs larger than memory, and where buffers and stacks lie."""

import ctypes
import itertools
import mmap
from pathlib import Path

import mlx.core as mx
import pytest

from cortexmlx.errors import KernelFault
from cortexmlx.metal.lab import sim
from cortexmlx.metal.lab.sim.buffers import RELEASE_ABOVE, SLOT, STACK_BYTES, device_memory, offset_of
from support.kernels.sim_tools import launch

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


# Inputs larger than memory: offsets beyond 32 bits are reached, and those that overflow are caught.


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


# Where buffers and stacks lie: whoever leaves them ends the launch and not the process.

I = "uint i = thread_position_in_grid.x; "  # noqa: E741


@pytest.mark.parametrize("checked", [True, False])
def test_a_thread_that_outgrows_its_stack_ends_the_launch_and_not_the_process(checked):
    body = I + "float a[40000]; for (uint k = 0; k < 40000; k++) a[k] = x[k % 64]; y[i] = a[i * 7];"
    with sim.options(checked=checked), pytest.raises(KernelFault, match="its own variables do not fit"):
        launch(body)
    launch(I + "y[i] = x[i];")


def test_unmapped_memory_ends_an_unchecked_launch_and_not_the_process():
    with sim.options(checked=False), pytest.raises(KernelFault, match="unmapped memory"):
        launch(I + "y[i] = *(const device float*)(ulong(x[0]) * 8 + 16);")
    with sim.options(checked=False), pytest.raises(KernelFault, match="arithmetic fault"):
        launch(I + "y[i] = 100 / int(x[i]);")


def test_buffers_lie_gigabytes_apart_and_what_is_released_reads_as_zeros():
    memory = device_memory()
    assert memory is device_memory(), "one for the process"
    with memory.lock:
        places = [memory.place(slot) for slot in range(3)]
        assert places == [memory.place(slot) for slot in range(3)]
        assert all(place % mmap.PAGESIZE == 0 for place in places)
        assert min(abs(a - b) for a, b in itertools.combinations(places, 2)) >= SLOT // 2
        size = RELEASE_ABOVE + 1
        ctypes.memset(places[0] + size - 1, 7, 1)
        memory.release(0, size)
        assert ctypes.string_at(places[0] + size - 1, 1) == b"\0"


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux shows its maps there")
def test_no_stack_reaches_another():
    memory = device_memory()
    assert memory.stacks % mmap.PAGESIZE == 0
    lowest = {memory.stacks + thread * STACK_BYTES for thread in range(3)}
    maps = Path("/proc/self/maps").read_text().splitlines()
    guards = [line for line in maps if int(line.split("-")[0], 16) in lowest]
    assert [line.split()[1] for line in guards] == ["---p"] * 3
