"""Purse: how much time drafting may still lose. It bounds what any text can make drafting cost. Without mlx."""

from __future__ import annotations

CAP = 22.0
"""The most that can be lost in one go, in the time of so many decoded tokens."""

FILL = 0.004
"""How much comes in with each token, whatever it cost."""

START = 10.0
"""What there is at first: the first tries of a machine cost something, too."""


class Purse:
    """A bucket of time, in units of a decoded token's time at the rows that run. Losses are taken out, gains are put in
    up to `CAP`, and it fills slowly with each token.

    A step is allowed if there is enough for its worst case. So within any n tokens, drafting loses at most
    `CAP + FILL * n`, as far as its estimates of steps are right: for 1,000 tokens that is 2.6 %.
    """

    def __init__(self) -> None:
        self.level = START

    def allows(self, loss: float) -> bool:
        """Return whether a step may be tried that loses `loss` at the worst."""
        return loss <= max(self.level, 0.0)

    def put(self, tokens: float) -> None:
        """Put in the time of so many tokens that was won. What was lost is less than 0, and is taken out."""
        self.level = min(self.level + tokens, CAP)

    def fill(self, tokens: int) -> None:
        """Fill it, because `tokens` tokens have come."""
        self.put(FILL * tokens)
