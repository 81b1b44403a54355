"""KVBlockAllocator call by call: what it gives, what it refuses, what it costs."""

from __future__ import annotations

import itertools
import random
import sys
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from cortexmlx.errors import CortexError, KVBlockError, KVCacheFull
from cortexmlx.kv import allocator as allocator_module
from cortexmlx.kv import allocator as freeruns_module
from cortexmlx.kv.allocator import KVBlockAllocator, KVHandle
from support.effort import examples


def test_the_shortest_run_that_fits_is_taken_across_groups_of_lengths() -> None:
    # Lengths on both sides of 1,024 and 2,048, where the coarse bitmap takes over.
    lengths = [1, 2, 1022, 1023, 1024, 1025, 2047, 2048, 2049, 5000]
    order = random.Random(3).sample(lengths, len(lengths))
    allocator = KVBlockAllocator(sum(lengths) + len(lengths))
    start_of = {}
    for length in order:
        run = allocator.allocate(length + 1)
        start_of[length] = run.start
    assert allocator.free_blocks == 0
    for length in order:
        allocator.free(KVHandle(start_of[length], length))
    for n in (1, 2, 3, 1022, 1023, 1024, 1025, 1026, 2047, 2048, 2049, 2050, 5000):
        best = min(length for length in lengths if length >= n)
        run = allocator.allocate(n)
        assert run == KVHandle(start_of[best], n)
        allocator.free(run)
    with pytest.raises(KVCacheFull):
        allocator.allocate(5001)
    allocator.check_invariants()


def lines_run(call: Any, *arguments: Any) -> int:
    """Lines of the allocator that one call executes: its cost without a clock."""
    files = {allocator_module.__file__, freeruns_module.__file__}
    lines = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines
        if frame.f_code.co_filename not in files:
            return None
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call(*arguments)
    finally:
        sys.settrace(before)
    return lines


def test_a_call_runs_as_many_lines_at_a_hundred_thousand_blocks_as_at_a_thousand() -> None:
    def cost(total: int) -> list[int]:
        """Every second block is free, and the last 64: the worst case of a scan."""
        allocator = KVBlockAllocator(total)
        allocator.allocate(total)
        for block in range(0, total - 65, 2):
            allocator.free(KVHandle(block, 1))
        allocator.free(KVHandle(total - 64, 64))
        run = KVHandle(total - 64, 63)
        return [
            lines_run(allocator.allocate, 63),
            lines_run(allocator.extend, run, 1),
            lines_run(allocator.trim, KVHandle(run.start, 64), 10),
            lines_run(allocator.free, KVHandle(run.start, 10)),
            lines_run(lambda: allocator.largest_free_run),
        ]

    few, many = cost(1_000), cost(100_000)
    assert few == many
    assert max(many) < 60


def test_handles_are_immutable_and_empty_ones_own_nothing() -> None:
    allocator = KVBlockAllocator(8)
    run = allocator.allocate(4)
    with pytest.raises(AttributeError):
        run.count = 8  # type: ignore[misc]
    empty = allocator.trim(run, 0)
    assert empty == KVHandle(0, 0)
    assert allocator.used_blocks == 0
    allocator.free(empty)
    with pytest.raises(KVBlockError, match="allocate a new run"):
        allocator.extend(empty, 1)
    assert allocator.used_blocks == 0


@pytest.mark.parametrize(
    ("asked", "advice"),
    [
        (101, "can never hold it"),
        (1_000_000, "can never hold it"),
        (60, "wait for running requests"),
        (21, "several shorter runs"),
    ],
)
def test_a_full_arena_says_how_much_was_asked_free_and_in_one_run(asked: int, advice: str) -> None:
    allocator = KVBlockAllocator(100)
    allocator.allocate(100)
    for start in (0, 40):
        allocator.free(KVHandle(start, 20))
    with pytest.raises(KVCacheFull, match=f"run of {asked} .* 40 of 100 are free .* has 20: .*{advice}") as caught:
        allocator.allocate(asked)
    assert isinstance(caught.value, CortexError)
    assert allocator.block_map() == ("." * 20 + "X" * 20) * 2 + "X" * 20


@pytest.mark.parametrize("handle", [KVHandle(-1, 2), KVHandle(9, 2), KVHandle(10, 1), KVHandle(3, -1)])
def test_blocks_outside_the_arena_are_refused(handle: KVHandle) -> None:
    allocator = KVBlockAllocator(10)
    allocator.allocate(10)
    for call in (allocator.free, lambda run: allocator.trim(run, 0), lambda run: allocator.extend(run, 1)):
        with pytest.raises(KVBlockError, match="arena of 10 blocks"):
            call(handle)
    assert allocator.used_blocks == 10


@pytest.mark.parametrize("n", [0, -1])
def test_counts_below_one_are_refused(n: int) -> None:
    allocator = KVBlockAllocator(10)
    run = allocator.allocate(4)
    for call in (
        allocator.allocate,
        allocator.grow,
        allocator.shrink,
        KVBlockAllocator,
        lambda count: allocator.extend(run, count),
    ):
        with pytest.raises(KVBlockError):
            call(n)
    for keep in (-1, 5):
        with pytest.raises(KVBlockError, match="of 4 blocks"):
            allocator.trim(run, keep)
    assert (allocator.total_blocks, allocator.used_blocks) == (10, 4)


def test_numpy_integers_count_as_integers() -> None:
    allocator = KVBlockAllocator(np.int32(3000))
    run = allocator.allocate(np.int64(1500))
    assert type(run.start) is int and type(run.count) is int
    longer = allocator.extend(KVHandle(np.int32(0), np.int32(1500)), np.int32(2))
    assert longer == KVHandle(0, 1502)
    allocator.free(KVHandle(np.int32(0), np.int32(1502)))
    allocator.check_invariants()
    assert allocator.largest_free_run == 3000


# -- KVBlockAllocator in random histories, judged by a plain list of blocks -------------------------------------------


class AllocatorMachine(RuleBasedStateMachine):
    """Random histories against a list of booleans, which finds runs by walking them."""

    used: list[bool]
    runs: list[KVHandle]  # what the user holds; no two share a block

    @initialize(total=st.integers(1, 80))
    def start(self, total: int) -> None:
        self.allocator = KVBlockAllocator(total)
        self.used = [False] * total
        self.runs = []

    def free_run_lengths(self) -> list[int]:
        return [len(list(blocks)) for used, blocks in itertools.groupby(self.used) if not used]

    def mark(self, start: int, stop: int, used: bool) -> None:
        assert self.used[start:stop] == [not used] * (stop - start), "blocks changed hands twice"
        self.used[start:stop] = [used] * (stop - start)

    def draw_run(self, data: st.DataObject) -> KVHandle:
        return self.runs.pop(data.draw(st.integers(0, len(self.runs) - 1)))

    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        n = data.draw(st.integers(1, max(self.free_run_lengths(), default=0) + 2))
        fits = any(length >= n for length in self.free_run_lengths())
        if fits:
            run = self.allocator.allocate(n)
            assert run.count == n
            self.mark(run.start, run.stop, True)
            self.runs.append(run)
        else:
            with pytest.raises(KVCacheFull):
                self.allocator.allocate(n)

    @precondition(lambda self: self.runs)
    @rule(data=st.data(), n=st.integers(1, 20))
    def extend(self, data: st.DataObject, n: int) -> None:
        run = self.draw_run(data)
        fits = self.used[run.stop : run.stop + n] == [False] * n
        longer = self.allocator.extend(run, n)
        if fits:
            assert longer == KVHandle(run.start, run.count + n)
            self.mark(run.stop, run.stop + n, True)
            run = longer
        else:
            assert longer is None
        self.runs.append(run)

    @precondition(lambda self: self.runs)
    @rule(data=st.data())
    def trim(self, data: st.DataObject) -> None:
        run = self.draw_run(data)
        keep = data.draw(st.integers(0, run.count))
        shorter = self.allocator.trim(run, keep)
        assert shorter == KVHandle(run.start, keep)
        self.mark(run.start + keep, run.stop, False)
        if keep:
            self.runs.append(shorter)

    @precondition(lambda self: self.runs)
    @rule(data=st.data())
    def free_a_whole_run(self, data: st.DataObject) -> None:
        run = self.draw_run(data)
        self.allocator.free(run)
        self.mark(run.start, run.stop, False)

    @precondition(lambda self: self.runs)
    @rule(data=st.data())
    def free_a_part_of_a_run(self, data: st.DataObject) -> None:
        run = self.draw_run(data)
        start = data.draw(st.integers(run.start, run.stop - 1))
        stop = data.draw(st.integers(start + 1, run.stop))
        self.allocator.free(KVHandle(start, stop - start))
        self.mark(start, stop, False)
        rests = (KVHandle(run.start, start - run.start), KVHandle(stop, run.stop - stop))
        self.runs += [rest for rest in rests if rest.count]

    @precondition(lambda self: self.runs)
    @rule(data=st.data())
    def free_neighbouring_runs_together(self, data: st.DataObject) -> None:
        first = self.draw_run(data)
        by_start = {run.start: run for run in self.runs}
        stop = first.stop
        while stop in by_start:
            neighbour = by_start[stop]
            self.runs.remove(neighbour)
            stop = neighbour.stop
        self.allocator.free(KVHandle(first.start, stop - first.start))
        self.mark(first.start, stop, False)

    @precondition(lambda self: not all(self.used))
    @rule(data=st.data(), before=st.integers(0, 5), after=st.integers(1, 6))
    def blocks_that_are_not_allocated_are_refused(self, data: st.DataObject, before: int, after: int) -> None:
        hole = data.draw(st.sampled_from([block for block, used in enumerate(self.used) if not used]))
        start, stop = max(0, hole - before), min(len(self.used), hole + after)
        handle = KVHandle(start, stop - start)
        for call in (
            lambda: self.allocator.free(handle),
            lambda: self.allocator.trim(handle, 0),
            lambda: self.allocator.extend(handle, 1),
        ):
            with pytest.raises(KVBlockError, match="not allocated"):
                call()

    @precondition(lambda self: len(self.used) < 200)
    @rule(n=st.integers(1, 30))
    def grow(self, n: int) -> None:
        self.allocator.grow(n)
        self.used += [False] * n

    @rule(n=st.integers(1, 30))
    def shrink(self, n: int) -> None:
        if n < len(self.used) and not any(self.used[-n:]):
            self.allocator.shrink(n)
            del self.used[-n:]
        else:
            with pytest.raises(KVBlockError):
                self.allocator.shrink(n)

    @invariant()
    def agrees_with_the_list(self) -> None:
        lengths = self.free_run_lengths()
        free, largest = sum(lengths), max(lengths, default=0)
        assert self.allocator.block_map() == "".join("X" if used else "." for used in self.used)
        assert self.allocator.total_blocks == len(self.used)
        assert (self.allocator.free_blocks, self.allocator.used_blocks) == (free, len(self.used) - free)
        assert sum(run.count for run in self.runs) == self.allocator.used_blocks
        assert self.allocator.largest_free_run == largest
        assert self.allocator.fragmentation() == (1 - largest / free if free else 0)
        assert [run.count for run in self.allocator.free_runs()] == lengths
        assert self.allocator.free_blocks_at_end == (lengths[-1] if not self.used[-1] else 0)
        self.allocator.check_invariants()


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(max_examples=examples(60), stateful_step_count=50, deadline=None)


@pytest.mark.slow
def test_allocator_agrees_with_the_list_in_long_histories() -> None:
    run_state_machine_as_test(
        AllocatorMachine, settings=settings(max_examples=examples(1000), stateful_step_count=100, deadline=None)
    )
