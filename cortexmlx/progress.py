"""Progress of downloading, loading or prefill, as plain frozen data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Doing = Literal["downloading", "loading", "prefilling"]
"""What may take a while: a model is fetched, brought into memory, and a prompt computed."""

UNITS: dict[Doing, str] = {"downloading": "bytes", "loading": "steps", "prefilling": "tokens"}


@dataclass(frozen=True)
class Progress:
    """`done` of `total` are done, in `unit`s; `total` may grow, and is 0 while nothing is known.
    `cached` of those done were there before. `rate` is how many were done per second lately, 0 where nobody counts.
    """

    what: Doing
    done: int
    total: int
    cached: int = 0
    rate: float = 0.0

    @property
    def unit(self) -> str:
        """What is counted: "bytes", "steps" or "tokens"."""
        return UNITS[self.what]

    @property
    def fraction(self) -> float:
        """How much is done, 0 to 1."""
        return min(1.0, self.done / self.total) if self.total else 0.0

    @property
    def seconds_left(self) -> float | None:
        """How long the rest takes at this rate; None while there is none."""
        return (self.total - self.done) / self.rate if self.rate else None


OnProgress = Callable[[Progress], None]
"""Is told how far something is. It must return at once, for what it is told of waits for it."""
