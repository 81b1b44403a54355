"""Estimates what a step's tokens cost, and how many prompt tokens a step may compute beside decoding rows. Without mlx
or a clock.
"""

from __future__ import annotations

from cortexmlx.scheduling.plan import StepPlan

MIN_PIECE = 16
"""How many prompt tokens a step computes at least, however tight the target is."""

LONE_SECONDS = 1.0
"""How long a step may take whose prompt tokens are more than usual, since no row decodes."""

LONE_SCORES = 2048 * 8192
"""Scores of a head in such a step, at most: as many as 512 tokens have after 32,256, if an array keeps them."""

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
        new_cost = seconds / tokens
        old_cost = self.seconds_per_token
        self.seconds_per_token = new_cost if old_cost is None else old_cost + _NEWEST_WEIGHT * (new_cost - old_cost)

    def learn(self, plan: StepPlan, seconds: float) -> None:
        """Update the estimate from a step that took `seconds`, if it computed pieces of prompts and loaded nothing from
        disk. The share of verified drafts in the time is left out.
        """
        if plan.loads or all(len(segment.logits) == segment.count for segment in plan.segments):
            return
        tokens = len(plan.positions)
        undrafted_tokens = tokens - sum(max(len(segment.logits) - 1, 0) for segment in plan.segments)
        self.observe(undrafted_tokens, seconds * undrafted_tokens / tokens)

    def tokens_within(self, seconds: float, min_tokens: int, max_tokens: int) -> int:
        """Return how many tokens fit in `seconds`, from `min_tokens` to `max_tokens`; before any step, `min_tokens`."""
        if self.seconds_per_token is None:
            return min_tokens
        return max(min_tokens, min(max_tokens, int(seconds / self.seconds_per_token)))

    def prompt_budget(self, seconds: float | None, max_tokens: int, decode_rows: int) -> int:
        """Return how many prompt tokens a step may compute beside `decode_rows` rows, to take about `seconds` (None:
        any time). The step has at most `max_tokens` tokens in all, and at least `MIN_PIECE` of prompts.
        """
        min_tokens = min(MIN_PIECE, max_tokens)
        return max(
            min_tokens,
            (max_tokens if seconds is None else self.tokens_within(seconds, min_tokens, max_tokens)) - decode_rows,
        )

    def lone_budget(self, min_tokens: int, max_tokens: int, context: int) -> int:
        """Return how many prompt tokens a step without decoding rows may compute after `context` earlier tokens: at
        least `min_tokens`. More, up to `max_tokens`, must take at most `LONE_SECONDS`, since a new request waits for
        the step's end, and have at most `LONE_SCORES` attention scores per head.
        """
        while max_tokens > min_tokens and max_tokens * (context + max_tokens) > LONE_SCORES:
            max_tokens //= 2
        return self.tokens_within(LONE_SECONDS, min_tokens, max(min_tokens, max_tokens))


def share_budget(budget: int, needed_tokens: list[int]) -> list[int]:
    """Divide a step's budget of prompt tokens among prompts, the oldest first. `needed_tokens` are the tokens that each
    prompt still lacks.

    The oldest prompt gets half while others wait. The other half goes to the shortest prompts first, and what is left
    to the oldest again. So a long prompt advances, and short ones need not wait for its end.
    """
    if not needed_tokens:
        return []
    parts = [0] * len(needed_tokens)
    parts[0] = min(needed_tokens[0], budget if len(needed_tokens) == 1 else (budget + 1) // 2)
    remaining_budget = budget - parts[0]
    for i in sorted(range(1, len(needed_tokens)), key=lambda i: needed_tokens[i]):
        parts[i] = min(needed_tokens[i], remaining_budget)
        remaining_budget -= parts[i]
    parts[0] += min(remaining_budget, needed_tokens[0] - parts[0])
    return parts
