"""What an import takes is measured beside a Python that imports nothing."""

from __future__ import annotations

import subprocess

import pytest

from cortexmlx.bench.studies.import_time import measure


def test_what_works_longer_costs_more_and_what_only_waits_costs_wall_time() -> None:
    works, waits = measure(("sum(range(8_000_000))", "import time; time.sleep(0.3)"), turns=1)
    assert works.cpu > waits.cpu + 20 and waits.wall > 250
    assert works.program.startswith("sum") and waits.cpu < 150


def test_a_program_that_fails_is_no_measurement() -> None:
    with pytest.raises(subprocess.CalledProcessError):
        measure(("raise SystemExit(1)",), turns=1)
