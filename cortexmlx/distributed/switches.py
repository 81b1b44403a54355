"""What the environment sets about hosts: when a worker hangs, and how often plans are compared."""

from __future__ import annotations

import math
import os

from cortexmlx.distributed.options import COMPARE_EVERY
from cortexmlx.distributed.wire.overdue import DEFAULT_HANG_LIMITS, HANG_SWITCH, LONGER, HangLimits
from cortexmlx.errors import InvalidRequest

COMPARE_SWITCH = "CORTEXMLX_COMPARE_EVERY"
"""The environment variable that says after how many steps the workers' plans are compared: 1 in debug runs."""


def hang_limits() -> HangLimits:
    """Return when a worker hangs. Raises InvalidRequest."""
    text = os.environ.get(HANG_SWITCH)
    if text is None:
        return DEFAULT_HANG_LIMITS
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not (math.isfinite(seconds) and seconds >= 0):
        raise InvalidRequest(f"{HANG_SWITCH}={text}: give a number of seconds, or 0 for no limit")
    return HangLimits(seconds, max(DEFAULT_HANG_LIMITS.first_seconds, LONGER * seconds))


def compare_every() -> int:
    """Return after how many steps plans are compared. Raises InvalidRequest."""
    text = os.environ.get(COMPARE_SWITCH)
    if text is None:
        return COMPARE_EVERY
    if not (text.isascii() and text.isdigit() and int(text[:9]) > 0):
        raise InvalidRequest(f"{COMPARE_SWITCH}={text}: give a number of steps, 1 or more")
    return int(text[:9])
