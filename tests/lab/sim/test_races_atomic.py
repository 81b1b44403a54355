"""The race detector against an oracle: every pair of plain and atomic accesses in every order, and random schedules of
accesses and barriers, judged pair by pair in Python.
"""

import itertools

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cortexmlx.metal.lab import sim
from support.effort import examples

THREADS, CELLS, STEPS, SEEDS = 96, 2, 6, 5
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
        found = {found_race(space, 96, kinds, plan, seed) for seed in range(SEEDS)}
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
    assert {found_race("device", 48, kinds, plan, seed) for seed in range(SEEDS)} == {True}


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
    assert {found_race(space, threadgroup, kinds, plan, seed) for seed in range(SEEDS)} == {expected}
