"""Samples of the machine's own speed."""

from __future__ import annotations

import pytest

from cortexmlx.bench.measure.yardstick import COMPUTE, MEMORY, Yardstick


@pytest.fixture(autouse=True)
def small_yardstick() -> None:
    """Here it has its own size."""


def test_every_sample_counts_both_parts_by_both_clocks() -> None:
    yardstick = Yardstick()
    assert yardstick.all_seconds() == {}
    for _ in range(3):
        yardstick.add_sample()
    found = yardstick.all_seconds()
    assert set(found) == {f"{part}, {clock}" for part in (COMPUTE, MEMORY) for clock in ("wall", "CPU")}
    assert all(len(values) == 3 and min(values) > 0 for values in found.values())


def test_a_piece_of_work_stands_between_two_samples() -> None:
    yardstick = Yardstick()
    for _ in range(3):
        yardstick.add_sample()
    walls = yardstick.all_seconds()[f"{MEMORY}, wall"]
    assert yardstick.sample_count == 3
    assert yardstick.seconds_around(1)[f"{MEMORY}, wall"] == pytest.approx((walls[1] * walls[2]) ** 0.5)
    assert yardstick.seconds_around(2)[f"{MEMORY}, wall"] == pytest.approx(walls[2]), (
        "an interrupt left nothing behind it"
    )
    assert 2**27 < yardstick.bytes < 1.1 * 2**27
