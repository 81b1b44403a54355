"""`sim.metal_kernel` is called as `mx.fast.metal_kernel` is: inputs of every kind, and what is refused in words."""

import mlx.core as mx
import pytest

from cortexmlx.errors import KernelCompileError, KernelFault
from cortexmlx.metal.lab import legal, sim
from cortexmlx.metal.lab.sim import kernel
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


# Before a text first runs, the simulator asks what Metal would refuse of it. What is refused: tests/lab/legal.


def test_a_helper_for_device_memory_fails_for_seven_elements_and_works_for_eight():
    header = "inline float first(const device float* p) { return p[0]; }\n"
    launch(I + "y[i] = first(x);", header=header, count=8, threadgroup=8)
    with pytest.raises(KernelCompileError, match="pointer to constant as a pointer to device"):
        launch(I + "y[i] = first(x);", header=header, count=7, threadgroup=7)


def test_arithmetic_of_bfloats_stays_bfloat():
    body = (
        "T a = x[i]; a = a * a + a; a += x[i]; a *= 2; a = max(a, -a); float f = a; f += a; y[i] = a > T(f) ? a : T(f);"
    )
    launch(I + body, dtype=mx.bfloat16)


def test_a_struct_may_be_copied_out_of_any_address_space():
    header = "struct Pair { float a; float b; };\ninline float sum(Pair p) { return p.a + p.b; }\n"
    launch(I + "threadgroup Pair s[64]; s[i] = Pair{x[i], 1}; Pair p = s[i]; y[i] = sum(p) + sum(s[i]);", header=header)


def test_a_compile_error_names_the_line_of_the_kernel_text():
    body = "uint i = thread_position_in_grid.x;\ny[i] = nonsense;"
    with pytest.raises(KernelCompileError, match=r"probe: line 7: .*undeclared identifier 'nonsense'"):
        launch(body)
    with sim.options(static_pass=False), pytest.raises(KernelCompileError, match=r"kernel:7:.*'nonsense'"):
        launch(body)


def test_the_pass_can_be_left_out():
    with sim.options(static_pass=False):
        launch(I + "float a = 1;\nfloat& b = a; y[i] = b;")


def test_without_the_front_end_a_warning_says_that_nothing_is_judged(monkeypatch):
    monkeypatch.setattr(legal, "available", lambda: False)
    kernel._warn_once_unchecked.cache_clear()
    with pytest.warns(UserWarning, match="pip install libclang"):
        launch(I + "float a = 2;\nfloat& unspaced = a; y[i] = unspaced;")


def test_a_text_that_passed_is_not_judged_again(monkeypatch):
    body = I + "y[i] = x[i] + 41;"
    launch(body)
    monkeypatch.setattr(legal, "complaints", lambda *_: pytest.fail("judged twice"))
    launch(body)
