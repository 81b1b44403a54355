"""The cost of a call by the size of the arena, measured in small ones."""

from __future__ import annotations

from cortexmlx.bench.studies.allocator import LONGEST, measure_churn, report


def test_the_table_comes_out_of_small_arenas() -> None:
    churn = measure_churn((LONGEST * 2, LONGEST * 8), repeats=2, calls=16)
    assert [cost.total_blocks for cost in churn] == [LONGEST * 2, LONGEST * 8]
    assert all(0 <= cost.fragmentation <= 1 and len(cost.repeats_us) == 2 for cost in churn)
    assert all(us > 0 for cost in churn for us in cost.repeats_us)
    text = report(churn)
    assert "| 128 | " in text and "| 1.00x |" in text
