"""The values of thread attributes, also at the edges of a grid."""

import itertools

import mlx.core as mx
import numpy as np
import pytest

from cortexmlx.errors import KernelFault
from cortexmlx.metal.lab import sim
from support.kernels.sim_tools import launch


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


# A thread's own arrays: no index leaves one, whatever loops are unrolled and whatever function the array goes to.


I = "uint i = thread_position_in_grid.x; "  # noqa: E741
UNROLL = '_Pragma("clang loop unroll(full)") '
HEADER = f"""
struct Pair {{ float a[4]; float b[4]; }};
template <int COUNT> inline void fill(const device float* from, thread float* to) {{
  {UNROLL} for (int n = 0; n < COUNT; n++) {{ to[n] = from[n]; }}
}}
template <int COUNT> inline void again(const device float* from, thread float* to) {{ fill<COUNT>(from, to); }}
template <int COUNT, typename V> inline float sum(const thread V* a) {{
  float s = 0;
  {UNROLL} for (int n = 0; n < COUNT; n++) {{ s += float(a[n][0]); }}
  return s;
}}
template <int COUNT> inline void ones(thread simdgroup_matrix<float, 8, 8>* m) {{
  {UNROLL} for (int n = 0; n < COUNT; n++) {{ m[n].thread_elements()[0] = 1.0f; }}
}}
template <int COUNT> inline void first(thread Pair& p) {{
  {UNROLL} for (int n = 0; n < COUNT; n++) {{ p.a[n] = n; }}
}}
"""
# name -> body; COUNT is 4 where it is right and WRONG where it is not
BODIES = {
    "an array": (I + "float a[4]; " + UNROLL + "for (int n = 0; n < COUNT; n++) a[n] = x[n]; y[i] = a[3];", 5),
    "a pointer": (
        I + "float a[4]; thread float* p = a; " + UNROLL + "for (int n = 0; n < COUNT; n++) p[n] = x[n]; y[i] = a[3];",
        5,
    ),
    "a function": (I + "float a[4]; fill<COUNT>(x, a); y[i] = a[3];", 8),
    "a function of a function": (I + "float a[4]; again<COUNT>(x, a); y[i] = a[3];", 5),
    "a row": (I + "float a[2][4]; fill<4>(x, a[1]); fill<COUNT>(x, a[0]); y[i] = a[1][0];", 5),
    "rows": (
        I + "float a[2][4]; " + UNROLL + "for (int r = 0; r < 2; r++) fill<COUNT>(x, a[r]); y[i] = a[1][0];",
        5,
    ),
    "a member": (I + "Pair p; fill<4>(x, p.b); fill<COUNT>(x, p.a); y[i] = p.b[0];", 5),
    "the last member": (I + "Pair p; fill<4>(x, p.a); fill<COUNT>(x, p.b); y[i] = p.a[0];", 5),
    "a member by reference": (I + "Pair p; p.b[0] = 1; first<COUNT>(p); y[i] = p.b[0];", 5),
    "vectors that are read": (I + "float4 v[4] = {1, 2, 3, 4}; y[i] = sum<COUNT>(v);", 5),
    "an element of a vector": (
        I + "float4 v = 0; " + UNROLL + "for (int n = 0; n < COUNT; n++) v[n] = x[n]; y[i] = v.x;",
        5,
    ),
    "matrices": (I + "simdgroup_matrix<float, 8, 8> m[4]; ones<COUNT>(m); y[i] = m[0].thread_elements()[0];", 5),
}


@pytest.mark.parametrize("name", BODIES)
def test_an_index_outside_a_threads_own_array_is_found_though_it_is_a_constant(name):
    body, wrong = BODIES[name]
    with pytest.raises(KernelFault, match=r"index \d+ of|past the end of an array"):
        launch(body.replace("COUNT", str(wrong)), header=HEADER)


def test_indices_within_them_are_no_fault():
    launch("".join(f"{{ {body.replace('COUNT', '4')} }}\n" for body, _ in BODIES.values()), header=HEADER)


def test_a_pointer_that_a_function_moves_stays_one():
    header = """
inline float total(const thread float* at, int n) {
  float s = 0;
  while (n-- > 0) { s += *at++; }
  return s;
}
"""
    y, _ = launch(I + "float a[3] = {1, 2, x[i]}; y[i] = total(a, 3);", header=header)
    assert y[:3].tolist() == [3, 4, 5]
