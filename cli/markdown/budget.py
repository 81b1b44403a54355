"""Bound how much of a growing answer the parser reads again."""

from __future__ import annotations

RATE = 64
"""Characters that the parser may read per character of the answer."""
BURST = 20_000
"""Characters that the parser may read in addition. An answer of usual length never uses them up."""


class Budget:
    """The number of characters that the parser may still read.

    One reading may overdraw the budget, and the next then waits for more text. So all readings of `n` characters of
    text are at most `RATE * n + BURST` and one reading.
    """

    def __init__(self) -> None:
        self._left = BURST

    def earn(self, characters: int) -> None:
        """Count new characters of the answer."""
        self._left += RATE * characters

    def spend(self, characters: int) -> None:
        """Count characters that the parser reads."""
        self._left -= characters

    def allows(self, characters: int = 0) -> bool:
        """Return whether more than `characters` of the budget are left."""
        return self._left > characters
