"""Chances: how likely drafted tokens are right, learned from what was guessed and what came. Without mlx.

Most guesses are compared with the tokens that plain decoding brings, which costs nothing. The first token of a guess is
wrong more often than one that follows right ones, so chances are kept by the number of right ones before.
"""

from __future__ import annotations

from cortexmlx.scheduling.job import JobId

Source = tuple[str, int]
"""A drafter's name and the likeness of a draft."""

STREAKS = (1, 4, 12)
"""Tokens guessed right in succession are told apart in these classes: none, 1 .. 3, 4 .. 11, more."""

PRIOR = (0.3, 0.6, 0.8, 0.9)
"""The chances of an unknown source, by class."""

_OF_PRIOR, _OF_ALL = 4.0, 4.0
"""How many tokens the prior counts against those of all rows, and these against those of one row."""

_LONG, _SHORT = 200.0, 16.0
"""Over how many tokens the chances of all rows, and of one row, are averaged."""


class Ratio:
    """Right tokens among the guessed ones; the older, the less they count."""

    def __init__(self, horizon: float) -> None:
        self.right = self.guessed = 0.0
        self._keep = 1 - 1 / horizon

    def add(self, right: bool) -> None:
        """Note whether a token was right."""
        self.right = self.right * self._keep + right
        self.guessed = self.guessed * self._keep + 1

    def mean(self, prior: float, weight: float) -> float:
        """Return the share of right ones, if `weight` tokens more had the share `prior`."""
        return (self.right + prior * weight) / (self.guessed + weight)


def streak_class(streak: int) -> int:
    """Return the class of a number of right tokens in succession."""
    return sum(streak >= least for least in STREAKS)


class Chances:
    """The chances of the guesses of each source, for all rows and for each row. `streak(job)` is how many tokens of a
    row were guessed right in succession.
    """

    def __init__(self) -> None:
        self._all: dict[tuple[Source, int], Ratio] = {}
        self._own: dict[JobId, dict[tuple[Source, int], Ratio]] = {}
        self._streaks: dict[JobId, int] = {}

    def streak(self, job: JobId) -> int:
        """Return how many tokens of a row were guessed right in succession."""
        return self._streaks.get(job, 0)

    def note(self, job: JobId, source: Source, right: bool) -> None:
        """Note whether the next token of a row was guessed right."""
        streak = self.streak(job)
        key = source, streak_class(streak)
        self._all.setdefault(key, Ratio(_LONG)).add(right)
        self._own.setdefault(job, {}).setdefault(key, Ratio(_SHORT)).add(right)
        self._streaks[job] = streak + 1 if right else 0

    def no_guess(self, job: JobId) -> None:
        """Note that nothing was guessed for a row."""
        self._streaks.pop(job, None)

    def of(self, job: JobId, source: Source, tokens: int) -> list[float]:
        """Return the chances that a row's next 1, 2, .. `tokens` guessed tokens are all right."""
        own, streak = self._own.get(job, {}), self.streak(job)
        chances, chance = [], 1.0
        by_class: dict[int, float] = {}
        for place in range(tokens):
            which = streak_class(streak + place)
            if which not in by_class:
                every = self._all.get((source, which))
                mean = PRIOR[which] if every is None else every.mean(PRIOR[which], _OF_PRIOR)
                mine = own.get((source, which))
                by_class[which] = mean if mine is None else mine.mean(mean, _OF_ALL)
            chance *= by_class[which]
            chances.append(chance)
        return chances

    @property
    def rows(self) -> int:
        """Of how many rows something is known."""
        return len(self._own.keys() | self._streaks.keys())

    def end(self, job: JobId) -> None:
        """Forget a row."""
        self._own.pop(job, None)
        self._streaks.pop(job, None)

    def forget(self) -> None:
        """Forget all rows, but not what was learned of all of them."""
        self._own.clear()
        self._streaks.clear()
