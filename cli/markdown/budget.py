"""Bound how much of a growing answer the parser reads again."""

from __future__ import annotations

RATE = 64
"""Characters that the parser may read for each that has come."""
BURST = 20_000
"""Characters that it may read besides: an answer of usual length never runs out of them."""


class Budget:
    """Counts what the parser has read. The last reading may overdraw it, and the next then waits for more text. So all
    readings of `n` characters that came are at most `RATE * n + BURST` and one reading.
    """

    def __init__(self) -> None:
        self._left = BURST

    def earn(self, characters: int) -> None:
        """So many characters have come."""
        self._left += RATE * characters

    def spend(self, characters: int) -> None:
        """The parser reads so many."""
        self._left -= characters

    def allows(self, characters: int = 0) -> bool:
        """Return whether it may read, and have so many left."""
        return self._left > characters
