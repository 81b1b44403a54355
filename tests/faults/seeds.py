"""Run one test under many seeds of the simulator in one process: `python -m tests.faults.seeds TEST SEEDS` prints under
how many it failed. A fault of order that a test notices under one seed alone is caught by luck.
"""

from __future__ import annotations

import contextlib
import io
import sys

import pytest

from cortexmlx.metal.lab import sim


def failures(test: str, seeds: int) -> int:
    """In how many of the seeds from 0 the test at this pytest address fails."""
    failed = 0
    for seed in range(seeds):
        with sim.options(seed=seed), contextlib.redirect_stdout(io.StringIO()):
            failed += pytest.main(["-x", "-q", "-p", "no:cacheprovider", test]) == pytest.ExitCode.TESTS_FAILED
    return failed


if __name__ == "__main__":
    print(failures(sys.argv[1], int(sys.argv[2])))
