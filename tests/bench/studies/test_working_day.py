"""A working day: growth is told from models that come and go, and every kind of work is done and answered."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cortexmlx.bench.studies.working_day import SAMPLE_SECONDS, WorkingDay, run_day


def day_of(growth: int) -> WorkingDay:
    """Two hours of a process that has 300 MB or 400, by chance, and grows by so many bytes an hour."""
    dice, day = np.random.default_rng(5), WorkingDay(7_200.0)
    for at in np.arange(0, 7_200, SAMPLE_SECONDS):
        size = int(300e6 + dice.integers(0, 2) * 100e6 + growth * at / 3600) if at > 600 else 10**9
        day.samples.append((float(at), size, 50_000_000, 0))
    return day


def test_growth_is_told_from_models_that_come_and_go() -> None:
    assert day_of(0).growing_kinds() == [] and day_of(40_000_000).growing_kinds() == ["process"]
    mean, slope, error = day_of(40_000_000).memory_trends()["process"]
    assert 380 < mean < 400 and abs(slope - 40) < 3 * error < 30


@pytest.mark.slow
def test_every_kind_of_work_is_done_and_answered(tmp_path: Path) -> None:
    day = run_day(0.01, 3, [], tmp_path)
    kinds = {name for name in day.work_counts if not name.startswith(("pressures", "sleeps"))}
    assert (
        day.faults == [] and len(kinds) == 7 and all(day.work_counts[kind] for kind in kinds) and len(day.samples) > 20
    )
