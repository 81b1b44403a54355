"""Stores that overlap: only the bytes that another wrote are compared, and who agrees does not race.

The detector against an oracle, with atomics and barriers, is below.
"""

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


# The race detector against an oracle: every pair of plain and atomic accesses in every order, and random schedules of
# accesses and barriers, judged pair by pair in Python.


THREADS, CELLS, STEPS, SCHEDULES = 96, 2, 6, 5
ACCESS, THREADGROUP_BARRIER, SIMDGROUP_BARRIER = range(3)
STEP_KINDS = 5
"""Of these the last two are barriers of no memory, which order nothing."""
READ, WRITE, LOAD, STORE, ADD, EXCHANGE, COMPARE = KINDS = range(1, 8)
PLAIN, WRITING = {READ, WRITE}, {WRITE, STORE, ADD, EXCHANGE, COMPARE}

# One program for every schedule: `plan[s, t]` says what thread t does in step s: 0, or kind * CELLS + cell.
BODY = """
uint i = thread_index_in_threadgroup;
int self = int(thread_position_in_grid.x);
CELLS_ARE
int sink = 0;
for (int s = 0; s < STEPS; s++) {
  if (kinds[s] == 1) {
    threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
  } else if (kinds[s] == 2) {
    simdgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
  } else if (kinds[s] == 3) {
    threadgroup_barrier(mem_flags::mem_none);
  } else if (kinds[s] == 4) {
    simdgroup_barrier(mem_flags::mem_none);
  } else {
    int what = plan[s * int(threads_per_grid.x) + self];
    SPACE atomic_int* cell = &cells[what % CELLS];
    int mine = 1000 * (s + 1) + self;
    int old = 0;
    switch (what / CELLS) {
      case 1: old = *(SPACE int*)cell; break;
      case 2: *(SPACE int*)cell = mine; break;
      case 3: old = atomic_load_explicit(cell, memory_order_relaxed); break;
      case 4: atomic_store_explicit(cell, mine, memory_order_relaxed); break;
      case 5: old = atomic_fetch_add_explicit(cell, 1, memory_order_relaxed); break;
      case 6: old = atomic_exchange_explicit(cell, mine, memory_order_relaxed); break;
      case 7:
        atomic_compare_exchange_weak_explicit(cell, &old, mine, memory_order_relaxed, memory_order_relaxed);
        break;
    }
    sink += old;
  }
}
sunk[self] = sink;
"""
THREADGROUP = """
threadgroup atomic_int cells[CELLS];
if (i < CELLS) atomic_store_explicit(&cells[i], 0, memory_order_relaxed);
threadgroup_barrier(mem_flags::mem_threadgroup);
"""


def kernel_of(space):
    source = BODY.replace("CELLS_ARE", THREADGROUP if space == "threadgroup" else "device atomic_int* cells = shared_;")
    source = source.replace("SPACE", space)
    if space == "threadgroup":
        return sim.metal_kernel(name="atomics", input_names=["kinds", "plan"], output_names=["sunk"], source=source)
    source = source.replace("shared_", "(device atomic_int*)shared")
    return sim.metal_kernel(
        name="atomics", input_names=["kinds", "plan"], output_names=["sunk", "shared"], source=source
    )


KERNELS = {space: kernel_of(space) for space in ("threadgroup", "device")}


def found_race(space, threadgroup, kinds, plan, seed):
    kernel, device = KERNELS[space], space == "device"
    with sim.options(seed=seed, allow=frozenset(sim.Fault)):
        kernel(
            inputs=[mx.array(kinds), mx.array(plan)],
            template=[("CELLS", CELLS), ("STEPS", STEPS)],
            grid=(THREADS, 1, 1),
            threadgroup=(threadgroup, 1, 1),
            output_shapes=[(THREADS,), (CELLS,)] if device else [(THREADS,)],
            output_dtypes=[mx.int32] * (1 + device),
            init_value=0,
        )
    return any(f.fault is sim.Fault.RACE for f in kernel.last_report.findings)


def conflict(first, second):
    """Not both atomic, and one of them writes: a compare-and-exchange counts, as it may succeed in another order."""
    return bool({first, second} & PLAIN) and bool({first, second} & WRITING)


def has_race(space, threadgroup, kinds, plan):
    group_epoch, simd_epoch = np.cumsum(kinds == THREADGROUP_BARRIER), np.cumsum(kinds == SIMDGROUP_BARRIER)
    accesses = [
        (*divmod(int(plan[s, t]), CELLS), t, s)
        for s, t in itertools.product(range(STEPS), range(THREADS))
        if kinds[s] == ACCESS and plan[s, t]
    ]
    for (kind_a, cell_a, a, at), (kind_b, cell_b, b, bt) in itertools.combinations(accesses, 2):
        if cell_a != cell_b or a == b or not conflict(kind_a, kind_b):
            continue
        if a // threadgroup != b // threadgroup:
            if space == "device":
                return True
            continue
        same_simdgroup = a % threadgroup // 32 == b % threadgroup // 32
        if group_epoch[at] == group_epoch[bt] and not (same_simdgroup and simd_epoch[at] != simd_epoch[bt]):
            return True
    return False


def schedule(*accesses):
    plan = np.zeros((STEPS, THREADS), dtype=np.int32)
    for step, thread, kind, cell in accesses:
        plan[step, thread] = kind * CELLS + cell
    return plan


@pytest.mark.parametrize("other", [1, 40], ids=["same simdgroup", "another simdgroup"])
@pytest.mark.parametrize("space", KERNELS)
def test_every_pair_of_kinds_is_judged_alike_in_every_order(space, other):
    """Thread 0 does one thing, `other` another: with any seed, and with each as the first in its thread's program."""
    kinds = np.zeros(STEPS, np.int32)
    for first, second in itertools.product(KINDS, KINDS):
        plan = schedule((0, 0, first, 0), (0, other, second, 0))
        found = {found_race(space, 96, kinds, plan, seed) for seed in range(SCHEDULES)}
        assert found == {conflict(first, second)}, (first, second)


@pytest.mark.parametrize("space", KERNELS)
def test_a_threads_second_access_does_not_hide_its_first(space):
    """Thread 0 does two things, thread 40 a third: only who conflicts counts, not who came last."""
    kinds = np.zeros(STEPS, np.int32)
    for first, second, third in itertools.product((READ, WRITE, LOAD), (READ, LOAD, ADD), (READ, WRITE, ADD)):
        plan = schedule((0, 0, first, 0), (1, 0, second, 0), (0, 40, third, 0))
        found = {found_race(space, 96, kinds, plan, seed) for seed in range(2)}
        assert found == {conflict(first, third) or conflict(second, third)}, (first, second, third)


def test_a_reader_of_another_threadgroup_is_not_forgotten_for_one_nearby():
    """Group 0 reads; of group 1 both simdgroups read, meet, and one of their lanes writes."""
    kinds = np.array([0, 1, 0, 0, 0, 0], np.int32)
    plan = schedule((0, 0, READ, 0), (0, 50, READ, 0), (0, 90, READ, 0), (2, 52, READ, 0), (3, 52, WRITE, 0))
    assert has_race("device", 48, kinds, plan)
    assert {found_race("device", 48, kinds, plan, seed) for seed in range(SCHEDULES)} == {True}


def test_reads_of_an_earlier_launch_are_long_gone():
    """Threadgroup memory lies at the same place again, with the records of whoever had it before."""
    kinds = np.zeros(STEPS, np.int32)
    reads, write = schedule((0, 2, READ, 0), (0, 64, READ, 0)), schedule((0, 31, WRITE, 0))
    assert not found_race("threadgroup", 96, kinds, reads, 0)
    assert not found_race("threadgroup", 96, kinds, write, 0)
    assert found_race("threadgroup", 96, kinds, reads + write, 0)


@st.composite
def schedules(draw):
    kinds = np.array(draw(st.lists(st.integers(0, STEP_KINDS - 1), min_size=STEPS, max_size=STEPS)), dtype=np.int32)
    threads = st.sampled_from([0, 1, 2, 31, 32, 33, 63, 64, 95])
    access = st.tuples(st.integers(0, STEPS - 1), threads, st.sampled_from(KINDS), st.integers(0, CELLS - 1))
    return kinds, schedule(*draw(st.lists(access, max_size=8)))


@pytest.mark.parametrize(
    ("space", "threadgroup"), [("threadgroup", 96), ("threadgroup", 48), ("device", 96), ("device", 32)]
)
@settings(max_examples=examples(40), deadline=None)
@given(schedules())
def test_a_race_is_reported_exactly_when_two_accesses_conflict(space, threadgroup, made):
    kinds, plan = made
    expected = has_race(space, threadgroup, kinds, plan)
    assert {found_race(space, threadgroup, kinds, plan, seed) for seed in range(SCHEDULES)} == {expected}
