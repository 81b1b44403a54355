"""The one limit on waiting in tests. A test waits for the event itself; the limit only ends a hang."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

PATIENCE = 600.0
"""Seconds. No test may expect anything within them: other programs may use all cores."""


def soon(condition: Callable[[], Any]) -> bool:
    """Wait until `condition` holds. Return whether it does before the limit."""
    until = time.monotonic() + PATIENCE
    while not (there := condition()) and time.monotonic() < until:
        time.sleep(0.005)
    return bool(there)
