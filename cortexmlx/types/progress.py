"""Progress of downloading, loading or prefill, as plain frozen data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Doing = Literal["downloading", "loading", "compiling", "prefilling"]
"""Work that may take a while: a model is downloaded or loaded into memory, its attention kernels are compiled and
checked, or a prompt is computed.
"""

UNITS: dict[Doing, str] = {"downloading": "bytes", "loading": "steps", "compiling": "kernels", "prefilling": "tokens"}


@dataclass(frozen=True)
class Progress:
    """How far a task has come: `done` of `total` units. `total` may grow, and is 0 while it is unknown."""

    what: Doing
    done: int
    total: int
    cached: int = 0
    """How many of those done did not need any work, because they existed before."""
    rate: float = 0.0
    """How many were done per second lately; 0 if that is not measured."""

    @property
    def unit(self) -> str:
        """The unit: "bytes", "steps", "kernels" or "tokens"."""
        return UNITS[self.what]

    @property
    def fraction(self) -> float:
        """The part that is done, 0 to 1."""
        return min(1.0, self.done / self.total) if self.total else 0.0

    @property
    def seconds_left(self) -> float | None:
        """How many seconds the rest takes at this rate; None without a rate."""
        return (self.total - self.done) / self.rate if self.rate else None


OnProgress = Callable[[Progress], None]
"""Called with the progress. It must return at once, since the work waits for it."""
