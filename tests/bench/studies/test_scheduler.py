"""What the scheduler costs per step, measured with no model."""

from __future__ import annotations

from cortexmlx.bench.studies import scheduler


def test_the_scheduler_alone_is_measured_on_every_full_step() -> None:
    cost = scheduler.measure(rows=3, blocks=512, cached=20, steps=40)
    assert 30 <= len(cost.milliseconds) <= 40
    assert 0 < cost.median <= cost.worst
    assert "| 3 | 512 | 20 |" in scheduler.report([cost])
