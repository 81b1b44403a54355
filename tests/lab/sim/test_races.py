"""The race detector against an oracle: random schedules of accesses and barriers, judged pair by pair in Python."""

import itertools

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cortexmlx.errors import KernelFault
from cortexmlx.metal.lab import sim
from support.effort import examples
from support.kernels.sim_tools import launch

THREADS, CELLS, STEPS = 96, 4, 8
ACCESS, THREADGROUP_BARRIER, SIMDGROUP_BARRIER, EMPTY_BARRIER, EMPTY_SIMDGROUP_BARRIER = range(5)

# One program for every schedule: `plan[s, t]` says what thread t does in step s (k + 1 writes cell k, -k - 1 reads it).
SHARED = """
uint i = thread_index_in_threadgroup;
uint self = thread_position_in_grid.x;
threadgroup int cells[CELLS];
if (i < CELLS) cells[i] = 0;
threadgroup_barrier(mem_flags::mem_threadgroup);
int sink = 0;
for (int s = 0; s < STEPS; s++) {
  if (kinds[s] == 0) {
    int what = plan[s * int(threads_per_grid.x) + int(self)];
    if (what > 0) cells[what - 1] = int(self) + 1;
    else if (what < 0) sink += cells[-what - 1];
  } else if (kinds[s] == 1) {
    threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
  } else if (kinds[s] == 2) {
    simdgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
  } else if (kinds[s] == 3) {
    threadgroup_barrier(mem_flags::mem_none);
  } else {
    simdgroup_barrier(mem_flags::mem_none);
  }
}
sunk[self] = sink;
"""
DEVICE = SHARED.replace("threadgroup int cells[CELLS];\nif (i < CELLS) cells[i] = 0;\n", "")
TEMPLATE = [("CELLS", CELLS), ("STEPS", STEPS)]


def shared_kernel(kinds, plan, threadgroup):
    kernel = sim.metal_kernel(name="shared", input_names=["kinds", "plan"], output_names=["sunk"], source=SHARED)
    return kernel, {"output_shapes": [(THREADS,)], "output_dtypes": [mx.int32]}


def device_kernel(kinds, plan, threadgroup):
    kernel = sim.metal_kernel(
        name="device", input_names=["kinds", "plan"], output_names=["sunk", "cells"], source=DEVICE
    )
    return kernel, {"output_shapes": [(THREADS,), (CELLS,)], "output_dtypes": [mx.int32, mx.int32], "init_value": 0}


def found_race(make, kinds, plan, threadgroup, seed):
    kernel, outputs = make(kinds, plan, threadgroup)
    with sim.options(seed=seed, allow=frozenset(sim.Fault)):
        kernel(
            inputs=[mx.array(kinds), mx.array(plan)],
            template=TEMPLATE,
            grid=(THREADS, 1, 1),
            threadgroup=(threadgroup, 1, 1),
            **outputs,
        )
    return any(f.fault is sim.Fault.RACE for f in kernel.last_report.findings)


def racing_pair(kinds, plan, threadgroup, across):
    """Two accesses to one cell by different threads, one of them a write, with nothing that orders them."""
    group_epoch = np.cumsum(kinds == THREADGROUP_BARRIER)
    simd_epoch = np.cumsum(kinds == SIMDGROUP_BARRIER)
    accesses = [
        (abs(plan[s, t]) - 1, plan[s, t] > 0, t, s)
        for s, t in itertools.product(range(STEPS), range(THREADS))
        if kinds[s] == ACCESS and plan[s, t]
    ]
    for (cell_a, writes_a, a, at), (cell_b, writes_b, b, bt) in itertools.combinations(accesses, 2):
        if cell_a != cell_b or a == b or not (writes_a or writes_b):
            continue
        if a // threadgroup != b // threadgroup:
            if across:
                return a, b
            continue
        same_simdgroup = a % threadgroup // 32 == b % threadgroup // 32
        ordered = group_epoch[at] != group_epoch[bt] or (same_simdgroup and simd_epoch[at] != simd_epoch[bt])
        if not ordered:
            return a, b
    return None


@st.composite
def schedules(draw):
    kinds = np.array(draw(st.lists(st.integers(0, 4), min_size=STEPS, max_size=STEPS)), dtype=np.int32)
    plan = np.zeros((STEPS, THREADS), dtype=np.int32)
    few = st.sampled_from([0, 1, 2, 31, 32, 33, 63, 64, 95])
    accesses = st.tuples(st.integers(0, STEPS - 1), few, st.integers(1, CELLS), st.booleans())
    for step, thread, cell, writes in draw(st.lists(accesses, max_size=7)):
        plan[step, thread] = cell if writes else -cell
    return kinds, plan, draw(st.integers(0, 3))


@pytest.mark.parametrize(
    ("make", "threadgroup", "across"),
    [(shared_kernel, 96, False), (shared_kernel, 48, False), (device_kernel, 96, True), (device_kernel, 32, True)],
    ids=["threadgroup memory", "threadgroup memory of two groups", "device memory", "device memory of three groups"],
)
@settings(max_examples=examples(80), deadline=None)
@given(schedules())
def test_a_race_is_reported_exactly_when_two_accesses_are_unordered(make, threadgroup, across, schedule):
    kinds, plan, seed = schedule
    expected = racing_pair(kinds, plan, threadgroup, across)
    assert found_race(make, kinds, plan, threadgroup, seed) == (expected is not None), expected


def test_reads_of_an_earlier_launch_are_long_gone():
    """Threadgroup memory lies at the same place again, with the records of whoever had it before."""
    kinds, reads, write = np.zeros(STEPS, np.int32), *(np.zeros((STEPS, THREADS), np.int32) for _ in range(2))
    reads[0, [2, 64]] = -4
    write[0, 31] = 4
    assert not found_race(shared_kernel, kinds, reads, 96, 0)
    assert not found_race(shared_kernel, kinds, write, 96, 0)
    assert found_race(shared_kernel, kinds, reads + write, 96, 0)


def test_of_a_wide_store_only_the_bytes_that_another_wrote_are_compared():
    """Two threadgroups have three bools in common, which are equal; each stores another one with them, at once."""
    source = """
uint from = threadgroup_position_in_grid.x;
bool all = values[from] != 0;
*(device Four*)(y + from) = Four{all, all, all, all};
"""
    header = "struct Four { bool a, b, c, d; };\n"
    kernel = sim.metal_kernel(
        name="overlapping", input_names=["values"], output_names=["y"], source=source, header=header
    )
    size = {"grid": (2, 1, 1), "threadgroup": (1, 1, 1), "output_shapes": [(5,)], "output_dtypes": [mx.bool_]}
    for seed in range(4):
        with sim.options(seed=seed):
            (y,) = kernel(inputs=[mx.ones(8, dtype=mx.int32)], **size)
            with pytest.raises(KernelFault, match=r"(?s)race|wrote"):
                kernel(inputs=[mx.array([1, 0] * 4, dtype=mx.int32)], **size)
        assert y.tolist() == [True] * 5


# Threads that store the value that is there do not race: judged for each element of a large store on its own.

I = "uint i = thread_position_in_grid.x; "  # noqa: E741
HEADER = "struct Three { float v[3]; }; struct Twelve { float v[12]; };\n"
SEEDS = range(5)
COPIED = mx.array([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 0, 1, 2, 3, 4, 5, 6, 7, 8, 99, 10, 11], dtype=mx.float32)

# Two threadgroups of one thread each. What they share, they agree on.
AGREE = {
    "the last element is the other's first": (
        "Three t = {{2.0f * i, 2.0f * i + 1, 2.0f * i + 2}}; *(device Three*)(y + 2 * i) = t;"
    ),
    "all of a large struct": "Twelve t; for (int k = 0; k < 12; k++) t.v[k] = k; *(device Twelve*)y = t;",
    "one struct after the other": "Three t = {{1, 2, 3}}; *(device Three*)y = t; *(device Three*)(y + 3) = t;",
}
# The same, but for one element far behind the first.
DISAGREE = {
    "the last element of a struct": "Three t = {{1, 2, 3.0f + i}}; *(device Three*)y = t;",
    "an element of a large struct that is copied": "*(device Twelve*)y = ((const device Twelve*)x)[i];",
    "an element of the second of two copies": "*(device Three*)y = *(const device Three*)x; "
    "*(device Three*)(y + 3) = *(const device Three*)(x + 3 + 6 * i);",
}


@pytest.mark.parametrize("name", AGREE)
def test_structs_that_agree_where_they_overlap_do_not_race(name):
    for seed in SEEDS:
        with sim.options(seed=seed):
            _, report = launch(I + AGREE[name], header=HEADER, count=2, threadgroup=1, outputs=14, init_value=-1)
        assert report.benign_races > 0


@pytest.mark.parametrize("name", DISAGREE)
def test_an_element_in_which_they_differ_is_a_race(name):
    for seed in SEEDS:
        with sim.options(seed=seed), pytest.raises(KernelFault, match=r"race: .*writes element"):
            launch(I + DISAGREE[name], header=HEADER, count=2, threadgroup=1, outputs=14, init_value=-1, x=COPIED)
