"""Launching: a threadgroup at the grid's edge, limits before anything runs, initial values."""

import mlx.core as mx
import pytest

from cortexmlx.errors import KernelCompileError, KernelFault
from cortexmlx.metal.lab import sim
from support.kernels.sim_tools import launch

I = "uint i = thread_position_in_grid.x; "  # noqa: E741


def test_a_threadgroup_larger_than_the_grid_is_clipped():
    _, report = launch(I + "y[i] = threads_per_threadgroup.x;", count=10, threadgroup=256)
    assert report.threadgroup == (10, 1, 1)


def test_too_many_threads_and_buffers_are_refused_before_anything_runs():
    with pytest.raises(KernelFault, match="2048 threads in a threadgroup"):
        launch(I + "y[i] = 1;", count=2048, threadgroup=2048)
    names = [f"input_{n}" for n in range(31)]
    kernel = sim.metal_kernel(name="wide", input_names=names, output_names=["y"], source="y[0] = input_0[0];")

    def run() -> None:
        shapes = {"output_shapes": [(1,)], "output_dtypes": [mx.float32]}
        kernel(inputs=[mx.zeros((8,))] * 31, grid=(1, 1, 1), threadgroup=(1, 1, 1), **shapes)

    with pytest.raises(KernelCompileError, match="indices of buffers go from 0 to 30"):
        run()
    with sim.options(static_pass=False), pytest.raises(KernelFault, match="32 buffers"):
        run()


def test_an_output_with_an_initial_value_need_not_be_written():
    y, _ = launch(I + "if (i != 7) y[i] = x[i];", init_value=2.5)
    assert y[7].item() == 2.5
