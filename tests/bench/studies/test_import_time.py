"""What an import takes is measured beside a Python that imports nothing."""

from __future__ import annotations

import subprocess

import pytest

from cortexmlx.bench.studies import import_time
from cortexmlx.bench.studies.import_time import Cost, measure


def test_what_works_longer_costs_more_and_what_only_waits_costs_wall_time() -> None:
    works, nothing = measure(("sum(range(8_000_000))", "pass  # no more"), turns=1)
    assert works.cpu > nothing.cpu + 20
    assert works.program.startswith("sum") and nothing.cpu < 150


def test_cpu_time_is_the_median_and_wall_time_the_least_beside_those_of_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken = {"pass": [(0.5, 2.0), (0.5, 1.0), (9.0, 9.0)], "wait": [(0.5, 1.5), (0.25, 5.0), (0.75, 1.25)]}
    monkeypatch.setattr(import_time, "_run", lambda program: taken[program].pop(0))
    assert measure(("wait",), turns=3) == [Cost("wait", 0.0, 250.0)]


def test_a_program_that_fails_is_no_measurement() -> None:
    with pytest.raises(subprocess.CalledProcessError):
        measure(("raise SystemExit(1)",), turns=1)
