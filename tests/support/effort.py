"""How many examples a property gets: few before every change, all in `make test-slow`. And how many random trials."""

from __future__ import annotations

import os

THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"


def examples(count: int, few: int = 25) -> int:
    """Return `count` in a thorough run, and at most `few` in a quick one."""
    return count if THOROUGH else min(count, few)


def trial_seeds(count: int) -> range:
    """Return the seeds of the random trials of a kind of model: `count`, or as many as the variable TRIALS says."""
    return range(100, 100 + max(count, int(os.environ.get("TRIALS", count))))
