"""KVBlockAllocator under threads that each stamp the blocks they hold."""

from __future__ import annotations

import random
import sys
import threading
from typing import Any

import pytest

from cortexmlx.errors import KVCacheFull
from cortexmlx.kv.allocator import KVBlockAllocator, KVHandle
from support.patience import PATIENCE


def hammer(allocator: KVBlockAllocator, threads: int, operations: int) -> list[BaseException]:
    """Threads that allocate, extend, trim and free at random; each stamps its blocks and finds its stamp again."""
    owner = [0] * allocator.total_blocks
    failures: list[BaseException] = []
    together = threading.Barrier(threads)

    def stamp(start: int, stop: int, before: int, after: int) -> None:
        assert owner[start:stop] == [before] * (stop - start), f"blocks {start} to {stop} have another owner"
        owner[start:stop] = [after] * (stop - start)

    def work(me: int) -> None:
        rng, runs = random.Random(me), []
        try:
            together.wait()
            for _ in range(operations):
                choice = rng.random()
                if choice < 0.5 or not runs:
                    try:
                        runs.append(allocator.allocate(rng.randint(1, 16)))
                    except KVCacheFull:
                        continue
                    stamp(runs[-1].start, runs[-1].stop, 0, me)
                    continue
                run = runs.pop(rng.randrange(len(runs)))
                if choice < 0.65:
                    longer = allocator.extend(run, 2)
                    if longer:
                        stamp(run.stop, longer.stop, 0, me)
                    runs.append(longer or run)
                elif choice < 0.75:
                    keep = rng.randint(1, run.count)
                    stamp(run.start + keep, run.stop, me, 0)
                    runs.append(allocator.trim(run, keep))
                elif choice < 0.8:
                    assert 0.0 <= allocator.fragmentation() <= 1.0
                    assert len(allocator.block_map()) == len(owner)
                    allocator.check_invariants()
                    runs.append(run)
                else:
                    stamp(run.start, run.stop, me, 0)
                    allocator.free(run)
            for run in runs:
                stamp(run.start, run.stop, me, 0)
                allocator.free(run)
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work, args=(me,), daemon=True) for me in range(1, threads + 1)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=PATIENCE)
        assert not worker.is_alive(), "a thread hangs"
    return failures


@pytest.fixture
def frantic_switching() -> Any:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("frantic_switching")
def test_hammering_threads_share_no_block_and_lose_none() -> None:
    allocator = KVBlockAllocator(512)
    assert hammer(allocator, threads=8, operations=3000) == []
    allocator.check_invariants()
    assert allocator.free_runs() == [KVHandle(0, 512)]
