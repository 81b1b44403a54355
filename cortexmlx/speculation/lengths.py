"""How many drafted tokens of which rows a step verifies: those whose gain is greatest. Without mlx."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def choose(
    chances: Sequence[Sequence[float]],
    costs: Sequence[float],
    token: float,
    margin: float,
    allowed: Callable[[float, float], bool],
) -> list[int] | None:
    """Return how many drafted tokens of each row to verify; None if no number is worth it.

    `chances[row][j]` is how likely the first j + 1 drafted tokens of a row are all right, so it never rises with j.
    `costs[n - 1]` is the time that a step with n drafted tokens takes, and the switch to it, beyond that of as many
    decoded tokens as it brings if no draft is right. `token` is the time of a decoded token. What a step is expected to
    win must be more than `margin`; `allowed(cost, certain)` says whether it may cost that much if only `certain`
    drafted tokens turn out right.

    Costs need not rise with n, so every n is looked at, with the likeliest tokens of all rows.
    """
    each = sorted((-chance, place, row) for row, own in enumerate(chances) for place, chance in enumerate(own))
    best, most, expected, certain = 0, margin, 0.0, 0
    for number, (chance, _, _) in enumerate(each[: len(costs)], 1):
        expected -= chance
        certain += chance == -1.0
        won = expected * token - costs[number - 1]
        if won > most and allowed(costs[number - 1], certain):
            best, most = number, won
    if not best:
        return None
    lengths = [0] * len(chances)
    for _, _, row in each[:best]:
        lengths[row] += 1
    return lengths
