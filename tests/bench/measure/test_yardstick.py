"""Samples of the machine's own speed."""

from __future__ import annotations

from cortexmlx.bench.measure.yardstick import COMPUTE, MEMORY, Yardstick


def test_every_sample_counts_both_parts_by_both_clocks() -> None:
    yardstick = Yardstick()
    assert yardstick.seconds() == {}
    for _ in range(3):
        yardstick.sample()
    found = yardstick.seconds()
    assert set(found) == {f"{part}, {clock}" for part in (COMPUTE, MEMORY) for clock in ("wall", "CPU")}
    assert all(len(values) == 3 and min(values) > 0 for values in found.values())
