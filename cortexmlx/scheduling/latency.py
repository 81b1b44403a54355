"""How many prompt tokens a step may compute beside decoding rows, from the cost of recent steps. No mlx, no clock."""

from __future__ import annotations

LEAST_PIECE = 16
"""Prompt tokens that a step computes at least, however tight the target."""

_FORGETTING = 0.3
"""Weight of the newest step in the running mean."""


class CostModel:
    """A running estimate of the seconds that one token of a step costs.

    A step of t tokens takes about `t * seconds_per_token` when most of it is prefill; that is what a prompt's pieces
    do to the time between two tokens of everybody else.
    """

    def __init__(self) -> None:
        self.seconds_per_token: float | None = None

    def observe(self, tokens: int, seconds: float) -> None:
        """A step with prefill of `tokens` tokens in all took `seconds`."""
        cost = seconds / tokens
        known = self.seconds_per_token
        self.seconds_per_token = cost if known is None else known + _FORGETTING * (cost - known)

    def tokens_within(self, seconds: float, least: int, most: int) -> int:
        """Tokens that a step can compute in `seconds`, between `least` and `most`; `least` while nothing is known."""
        if self.seconds_per_token is None:
            return least
        return max(least, min(most, int(seconds / self.seconds_per_token)))

    def budget(self, seconds: float | None, most: int, decoding: int) -> int:
        """Prompt tokens of a step that takes about `seconds` (None: any time) beside `decoding` rows: `most` tokens in
        all at most, and `LEAST_PIECE` of prompts at least.
        """
        least = min(LEAST_PIECE, most)
        return max(least, (most if seconds is None else self.tokens_within(seconds, least, most)) - decoding)


def share(budget: int, needs: list[int]) -> list[int]:
    """Divide a step's prompt tokens among prompts, oldest first.

    The oldest gets half while others wait, the rest goes to the shortest first, and what is left to the oldest again.
    So a long prompt advances, and short ones need not wait for its end.
    """
    if not needs:
        return []
    parts = [0] * len(needs)
    parts[0] = min(needs[0], budget if len(needs) == 1 else (budget + 1) // 2)
    left = budget - parts[0]
    for i in sorted(range(1, len(needs)), key=lambda i: needs[i]):
        parts[i] = min(needs[i], left)
        left -= parts[i]
    parts[0] += min(left, needs[0] - parts[0])
    return parts
