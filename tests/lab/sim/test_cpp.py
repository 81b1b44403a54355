"""The values of thread attributes, also at the edges of a grid."""

import itertools

import mlx.core as mx
import numpy as np

from cortexmlx.metal.lab import sim


def grid_kernel(source, outputs=1):
    names = [f"out_{k}" for k in range(outputs)]
    return sim.metal_kernel(name="grid", input_names=["x"], output_names=names, source=source)


def test_attributes_of_a_grid_that_threadgroups_do_not_divide():
    names = [
        "thread_position_in_grid",
        "thread_position_in_threadgroup",
        "threadgroup_position_in_grid",
        "threads_per_threadgroup",
        "dispatch_threads_per_threadgroup",
        "threads_per_grid",
        "threadgroups_per_grid",
    ]
    scalars = [
        "thread_index_in_threadgroup",
        "thread_index_in_simdgroup",
        "simdgroup_index_in_threadgroup",
        "simdgroups_per_threadgroup",
        "quadgroup_index_in_threadgroup",
        "thread_index_in_quadgroup",
        "threads_per_simdgroup",
    ]
    grid, threadgroup = (7, 5, 3), (4, 3, 2)
    lines = ["uint3 g = thread_position_in_grid; uint at = (g.z * 5 + g.y) * 7 + g.x;"]
    lines += [f"for (int k = 0; k < 3; k++) out_{n}[at * 3 + k] = {name}[k];" for n, name in enumerate(names)]
    lines += [f"out_{n + len(names)}[at] = {name};" for n, name in enumerate(scalars)]
    shapes = [(3, 5, 7, 3)] * len(names) + [(3, 5, 7)] * len(scalars)
    results = grid_kernel("\n".join(lines), len(shapes))(
        inputs=[mx.zeros((8,))],
        grid=grid,
        threadgroup=threadgroup,
        output_shapes=shapes,
        output_dtypes=[mx.uint32] * len(shapes),
    )
    got = dict(zip(names + scalars, map(np.array, results), strict=True))
    for z, y, x in itertools.product(range(3), range(5), range(7)):
        at = np.array([x, y, z])
        group = at // threadgroup
        size = np.minimum(threadgroup, grid - group * threadgroup)
        local = at % threadgroup
        index = local[0] + size[0] * (local[1] + size[1] * local[2])
        expected = [at, local, group, size, threadgroup, grid, [2, 2, 2]]
        for name, value in zip(names, expected, strict=True):
            assert got[name][z, y, x].tolist() == list(value), name
        simdgroups = -(-size.prod() // 32)
        values = [index, index % 32, index // 32, simdgroups, index // 4, index % 4, 32]
        for name, value in zip(scalars, values, strict=True):
            assert got[name][z, y, x] == value, name
