"""How many examples a property gets: few before every change, all in `make test-slow`."""

from __future__ import annotations

import os

THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"


def examples(count: int, few: int = 25) -> int:
    """Return `count` in a thorough run, and at most `few` in a quick one."""
    return count if THOROUGH else min(count, few)
