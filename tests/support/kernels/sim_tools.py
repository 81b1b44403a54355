"""Small kernels for the simulator's tests: one float input `x`, one float output `y`, one thread an element."""

import mlx.core as mx

from cortexmlx.metal.lab import sim


def launch(source, *, count=64, threadgroup=64, header="", init_value=None, x=None, dtype=mx.float32, outputs=None):
    """Run `source` over `count` threads; returns (y, report)."""
    kernel = sim.metal_kernel(name="probe", input_names=["x"], output_names=["y"], source=source, header=header)
    (y,) = kernel(
        inputs=[mx.arange(count).astype(dtype) if x is None else x],
        template=[("T", dtype)],
        grid=(count, 1, 1),
        threadgroup=(threadgroup, 1, 1),
        output_shapes=[(outputs or count,)],
        output_dtypes=[dtype],
        init_value=init_value,
    )
    return y, kernel.last_report
