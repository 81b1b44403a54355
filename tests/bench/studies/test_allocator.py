"""The contestants of the allocator's benchmark do the same work: first fit, by an obvious search in a list."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortexmlx.bench.studies.allocator import (
    LONGEST,
    SCANS,
    Allocator,
    AllocatorBench,
    LoopScan,
    NumpyScan,
    SubstringScan,
    measure_churn,
    measure_scans,
    report,
)
from cortexmlx.errors import KVCacheFull
from cortexmlx.kv.allocator import KVHandle

BLOCKS = 24


def first_fit(used: list[bool], n: int) -> int | None:
    return next((at for at in range(len(used) - n + 1) if not any(used[at : at + n])), None)


@pytest.mark.parametrize("make", [LoopScan, NumpyScan, SubstringScan])
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 10)), max_size=40))
def test_a_scan_finds_the_first_run_that_is_long_enough(make: type, calls: list[tuple[bool, int]]) -> None:
    allocator: Allocator = make(BLOCKS)
    used, held = [False] * BLOCKS, list[KVHandle]()
    for allocates, n in calls:
        if not allocates and held:
            run = held.pop(n % len(held))
            allocator.free(run)
            used[run.start : run.stop] = [False] * run.count
            continue
        at = first_fit(used, n)
        if at is None:
            with pytest.raises(KVCacheFull, match=f"no run of {n} blocks"):
                allocator.allocate(n)
            continue
        held.append(allocator.allocate(n))
        assert held[-1] == KVHandle(at, n)
        used[at : at + n] = [True] * n


def test_both_tables_come_out_of_small_arenas() -> None:
    churn = measure_churn((LONGEST * 2, LONGEST * 8), repeats=2, calls=16)
    scans = measure_scans(LONGEST * 4, repeats=1)
    assert [cost.total_blocks for cost in churn] == [LONGEST * 2, LONGEST * 8]
    assert all(0 <= cost.fragmentation <= 1 and len(cost.repeats_us) == 2 for cost in churn)
    assert [cost.name for cost in scans] == [name for name, _ in SCANS]
    assert all(us > 0 for cost in (*churn, *scans) for us in cost.repeats_us)
    bench = AllocatorBench(churn, scans)
    assert bench.cost_growth == pytest.approx(churn[1].median_us / churn[0].median_us)
    text = report(bench)
    assert "| 128 | " in text and "| 1.00x |" in text and "| KVBlockAllocator | " in text and "| 1.0x |" in text
