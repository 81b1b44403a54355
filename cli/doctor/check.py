"""Check: one line of the report of `cortexmlx doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class CheckStatus(str, Enum):
    """The result of a check: ok, warn or fail."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class DoctorCheck:
    """One line of the report of `cortexmlx doctor`: its result and what to do."""

    name: str
    """What was checked."""
    verdict: CheckStatus
    detail: str
    """What was found."""
    advice: str = ""
    """What to do about it; empty for nothing."""
    message: str = ""
    """The whole text of a compiler or a library. Only `--json` shows it."""
