"""A duration as people write it: 30s, 10m, 1h."""

from __future__ import annotations

import re

from cortexmlx.errors import InvalidRequest

_WRITTEN = re.compile(r"\s*(\d+(?:\.\d*)?)\s*([smhd]?)\s*", re.IGNORECASE)
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def seconds_of(text: str) -> float | None:
    """Return the seconds of "30s", "10m", "1.5h", "1d" or a number of seconds; None for "never". Raises InvalidRequest
    for anything else, and for 0.
    """
    if text.strip().lower() == "never":
        return None
    written = _WRITTEN.fullmatch(text)
    seconds = float(written[1]) * _SECONDS[written[2].lower()] if written else 0.0
    if not 0 < seconds < 1e12:
        raise InvalidRequest(f"{text!r:.40} is no duration: write 30s, 10m, 1h, or never")
    return seconds
