"""`sim.metal_kernel` is called as `mx.fast.metal_kernel` is: inputs of every kind, and wrong calls in words."""

import mlx.core as mx
import pytest

from cortexmlx.errors import KernelFault
from cortexmlx.metal.lab import sim
from support.kernels.sim_tools import launch

I = "uint i = thread_position_in_grid.x; "  # noqa: E741
ONE = {"output_dtypes": [mx.float32]}


def grid_kernel(source, outputs=1):
    names = [f"out_{k}" for k in range(outputs)]
    return sim.metal_kernel(name="grid", input_names=["x"], output_names=names, source=source)


@pytest.mark.parametrize("dtype", [mx.bool_, mx.uint8, mx.int16, mx.uint32, mx.uint64], ids=str)
def test_integers_of_every_width_go_in_and_come_out(dtype):
    x = mx.array([0, 1, 1, 0, 1, 0, 0, 1, 1]).astype(dtype)
    y, _ = launch(I + "y[i] = x[i];", count=9, threadgroup=4, x=x, dtype=dtype)
    assert y.dtype == dtype
    assert mx.array_equal(y, x)


@pytest.mark.parametrize("dtype", [mx.int64, mx.complex64], ids=str)
def test_wide_elements_go_in_and_come_out(dtype):
    x = mx.arange(9).astype(dtype) * (1 + 2j if dtype == mx.complex64 else 10**12)
    y, _ = launch(I + "y[i] = x[i];", count=9, threadgroup=4, x=x, dtype=dtype)
    assert mx.array_equal(y, x)


def test_strided_inputs_are_copied_or_seen_as_they_are():
    base = mx.arange(24).astype(mx.float32).reshape(4, 6)
    source = I + "y[i] = x[(i / 4) * x_strides[0] + (i % 4) * x_strides[1]] + 100 * x_strides[1];"
    for contiguous, stride in ((True, 1), (False, 6)):
        kernel = sim.metal_kernel(
            name="strided", input_names=["x"], output_names=["y"], source=source, ensure_row_contiguous=contiguous
        )
        (y,) = kernel(
            inputs=[base.T], grid=(24, 1, 1), threadgroup=(8, 1, 1), output_shapes=[(6, 4)], output_dtypes=[mx.float32]
        )
        assert mx.array_equal(y, base.T + 100 * stride)


def test_an_index_past_the_end_of_a_strided_view_is_out_of_bounds():
    base = mx.arange(24).astype(mx.float32).reshape(4, 6)[:2]
    kernel = sim.metal_kernel(
        name="view",
        input_names=["x"],
        output_names=["y"],
        source="y[0] = x[12];",
        ensure_row_contiguous=False,
    )
    with pytest.raises(KernelFault, match="element 12 of 'x' \\(12 elements"):
        kernel(inputs=[base], grid=(1, 1, 1), threadgroup=(1, 1, 1), output_shapes=[(1,)], output_dtypes=[mx.float32])


def test_python_scalars_become_references():
    kernel = sim.metal_kernel(
        name="scalars", input_names=["a", "b", "c"], output_names=["y"], source="y[0] = a + b + (c ? 100.0f : 0.0f);"
    )
    (y,) = kernel(inputs=[2, 0.5, True], grid=(1, 1, 1), threadgroup=(1, 1, 1), output_shapes=[(1,)], **ONE)
    assert y.item() == 102.5


def test_wrong_calls_are_refused_in_words():
    kernel = grid_kernel("out_0[0] = x;")
    call = {"grid": (1, 1, 1), "threadgroup": (1, 1, 1), "output_shapes": [(1,)], "output_dtypes": [mx.float32]}
    with pytest.raises(ValueError, match="takes 1 inputs, 2 were given"):
        kernel(inputs=[1.0, 2.0], **call)
    with pytest.raises(ValueError, match="1 outputs, 2 shapes and 1 dtypes"):
        kernel(inputs=[1.0], **{**call, "output_shapes": [(1,), (1,)]})
    with pytest.raises(KernelFault, match="must be at least 1"):
        kernel(inputs=[1.0], **{**call, "grid": (0, 1, 1)})
    with pytest.raises(ValueError, match="unknown compile options"):
        sim.metal_kernel(name="k", input_names=[], output_names=["y"], source="", compile_options={"math_mode": "odd"})
