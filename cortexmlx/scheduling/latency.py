"""Estimates what a step's tokens cost, and how many prompt tokens a step may compute beside decoding rows. Without mlx
or a clock.
"""

from __future__ import annotations

from cortexmlx.scheduling.plan import StepPlan

LEAST_PIECE = 16
"""How many prompt tokens a step computes at least, however tight the target is."""

_NEWEST_WEIGHT = 0.3
"""Weight of the newest step in the running mean."""


class CostModel:
    """A running estimate of the seconds that a step takes per token.

    A step of t tokens takes about `t * seconds_per_token` if most of it is prefill. By as much, the pieces of a prompt
    delay the next token of every other row.
    """

    def __init__(self) -> None:
        self.seconds_per_token: float | None = None

    def observe(self, tokens: int, seconds: float) -> None:
        """Update the estimate: a step with prefill, of `tokens` tokens in all, took `seconds`."""
        cost = seconds / tokens
        known = self.seconds_per_token
        self.seconds_per_token = cost if known is None else known + _NEWEST_WEIGHT * (cost - known)

    def learn(self, plan: StepPlan, seconds: float) -> None:
        """Update the estimate from a step that took `seconds`, if it computed pieces of prompts and waited for no
        disk. Drafted tokens that it verified besides take their share of the time.
        """
        if plan.loads or all(len(segment.logits) == segment.count for segment in plan.segments):
            return
        tokens = len(plan.positions)
        alone = tokens - sum(max(len(segment.logits) - 1, 0) for segment in plan.segments)
        self.observe(alone, seconds * alone / tokens)

    def tokens_within(self, seconds: float, least: int, most: int) -> int:
        """Return how many tokens a step can compute in `seconds`, between `least` and `most`; `least` while no step was
        observed.
        """
        if self.seconds_per_token is None:
            return least
        return max(least, min(most, int(seconds / self.seconds_per_token)))

    def prompt_budget(self, seconds: float | None, most: int, decoding: int) -> int:
        """Return how many prompt tokens a step may compute beside `decoding` rows, to take about `seconds` (None: any
        time). The step has at most `most` tokens in all, and at least `LEAST_PIECE` of prompts.
        """
        least = min(LEAST_PIECE, most)
        return max(least, (most if seconds is None else self.tokens_within(seconds, least, most)) - decoding)


def share_budget(budget: int, needs: list[int]) -> list[int]:
    """Divide a step's budget of prompt tokens among prompts, the oldest first. `needs` are the tokens that each prompt
    still lacks.

    The oldest prompt gets half while others wait. The other half goes to the shortest prompts first, and what is left
    to the oldest again. So a long prompt advances, and short ones need not wait for its end.
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
