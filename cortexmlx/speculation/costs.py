"""StepCosts: how long steps take, by their rows and tokens, learned from the steps themselves. Without mlx or a clock.

A verifying step of t tokens must be compared with decode steps of the same rows. Neither is a straight line: on a CPU
four tokens can cost less than three. So each small number of tokens has an estimate of its own. What was never measured
is guessed from its neighbours, a little too cheap, so that it is tried.
"""

from __future__ import annotations

from collections import deque
from statistics import median_low

OPTIMISM = 0.92
"""What is guessed from neighbours counts as this much of the guess."""

PRIOR_SLOPE, PRIOR_SHARE = 0.1, 0.5
"""How much of a decode step each token more costs, as long as nothing like it was measured, and how much of the time of
a decoded token at most: more than on a GPU, less than on a CPU.
"""

FIRST, FIRST_OF_ROW = 4, 2
"""How many drafted tokens the first try verifies at most: this many, or so many for each row."""

_NEWEST = 9
"""An estimate is the median of so many measurements: one slow step on a busy machine does not move it."""

_EXACT = 32
"""Up to here each number of tokens has its own estimate; above it, eight numbers share each doubling."""

_FIRM = 3
"""So many measurements are believed for long."""

_SOON, _LATE = 300, 4000
"""After how many steps an estimate of fewer, or of at least `_FIRM` measurements is forgotten, so that it is tried
again.
"""

_BY_DECODE, _BY_VERIFY, _MOST = 0.5, 0.3, 2.0
"""How quickly the machine's speed follows the newest decode step, or verifying step, and how much of a surprise
counts. The cost of verifying may change by itself, and is learned the sooner, the less it moves the speed.
"""


class Estimate:
    """The median of the newest measurements of one kind of step."""

    def __init__(self) -> None:
        self.seen = 0
        self._values: deque[float] = deque(maxlen=_NEWEST)
        self._median: float | None = None

    def add(self, value: float, now: int) -> None:
        """Note a measurement at step `now`."""
        self._values.append(value)
        self._median = None
        self.seen = now

    def fresh(self, now: int) -> bool:
        """Return whether it is believed still at step `now`."""
        return now - self.seen <= (_LATE if len(self._values) >= _FIRM else _SOON)

    @property
    def value(self) -> float:
        """The median. Of two measurements it is the lower one."""
        if self._median is None:
            self._median = median_low(self._values)
        return self._median


class StepCosts:
    """Estimates of the time of decode steps that run ahead, by rows, and of verifying steps, by rows and tokens.

    All times are in units of the machine's speed, which is followed apart: if other programs slow the machine down for
    a while, all estimates stay comparable. `unit` is that speed: multiply by it for seconds.
    """

    def __init__(self) -> None:
        self.unit = 1.0
        self.now = 0
        self._decoding: dict[int, Estimate] = {}
        self._verifying: dict[int, dict[int, Estimate]] = {}
        self._of_any: dict[int, Estimate] = {}

    def decoded(self, rows: int, seconds: float) -> None:
        """Note that a decode step of `rows` rows took `seconds`, while others ran before and after it."""
        self._note([self._decoding.setdefault(size(rows), Estimate())], seconds, _BY_DECODE)

    def verified(self, rows: int, tokens: int, seconds: float) -> None:
        """Note that a step of `tokens` tokens, drafts among them, of `rows` rows took `seconds`."""
        own = self._verifying.setdefault(size(rows), {})
        key = size(tokens)
        self._note([own.setdefault(key, Estimate()), self._of_any.setdefault(key, Estimate())], seconds, _BY_VERIFY)

    def _note(self, estimates: list[Estimate], seconds: float, weight: float) -> None:
        self.now += 1
        first = estimates[0]
        if first.seen:
            surprise = seconds / (self.unit * first.value)
            self.unit *= min(max(surprise, 1 / _MOST), _MOST) ** weight
        for estimate in estimates:
            estimate.add(max(seconds, 1e-9) / self.unit, self.now)

    def decode(self, rows: int) -> float | None:
        """Return the time of a decode step of `rows` rows; None if it is not known."""
        estimate = self._decoding.get(size(rows))
        return None if estimate is None else estimate.value

    def verify(self, rows: int, drafted: int, decode: float) -> list[float]:
        """Return the times of steps of `rows` rows that verify 1, 2, .. `drafted` tokens, or fewer: only up to twice
        as many as were measured, so that no try costs far more than was thought. A decode step of these rows takes
        `decode`.
        """
        first = max(FIRST, FIRST_OF_ROW * rows)
        if known := self._known(rows):
            return _along(known, rows, min(drafted, max(first, 2 * (max(known) - rows))), decode)
        return [decode + _prior_slope(rows, decode) * more for more in range(1, min(drafted, first) + 1)]

    def measured(self, rows: int) -> bool:
        """Return whether a verifying step of more tokens than `rows` was measured."""
        return bool(self._known(rows))

    def _known(self, rows: int) -> dict[int, float]:
        """Return the times that are known of verifying steps of these rows, or else of any rows, by tokens."""
        for estimates in (self._verifying.get(size(rows), {}), self._of_any):
            known = {at: e.value for at, e in estimates.items() if at > rows and e.fresh(self.now)}
            if known:
                return known
        return {}


def _along(known: dict[int, float], rows: int, drafted: int, decode: float) -> list[float]:
    """Return the times of `rows` + 1, + 2, .. + `drafted` tokens on the line through what is known. It begins with a
    decode step.
    """
    places = sorted(known)
    below, low, reached = rows, decode, 0
    times = []
    for tokens in range(rows + 1, rows + drafted + 1):
        while reached < len(places) and places[reached] <= tokens:
            below, low = places[reached], known[places[reached]]
            reached += 1
        if below == size(tokens):
            times.append(max(low, decode / 2))
            continue
        if reached < len(places):
            above = places[reached]
            slope = (known[above] - low) / (above - below)
        else:
            slope = max((low - decode) / (below - rows), _prior_slope(rows, decode))
        times.append(max(OPTIMISM * (low + slope * (tokens - below)), decode / 2))
    return times


def _prior_slope(rows: int, decode: float) -> float:
    return min(PRIOR_SLOPE, PRIOR_SHARE / rows) * decode


def size(count: int) -> int:
    """Return the least number that shares an estimate with `count`."""
    if count <= _EXACT:
        return count
    grain = 1 << (count.bit_length() - 4)
    return count // grain * grain
