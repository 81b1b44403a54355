"""KVBlockAllocator in random histories, judged by a plain list of blocks."""

from __future__ import annotations

import itertools

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

from cortexmlx.errors import KVBlockError, KVCacheFull
from cortexmlx.kv.allocator import KVBlockAllocator, KVHandle
from support.effort import examples


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
