"""What steps cost by their rows and tokens, learned from the steps themselves, and how much time drafting may lose.
Without mlx or a clock.

A verifying step of t tokens must be compared with decode steps of the same rows. Neither is a straight line: on a CPU
four tokens can cost less than three. So each small number of tokens has an estimate of its own. What was never measured
is guessed from its neighbours, a little too cheap, so that it is tried.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

from cortexmlx.scheduling.plan import StepKind, StepPlan
from cortexmlx.scheduling.scheduler import Scheduler

MOST_UNSEEN_STEPS = 128
"""After so many verifying steps some tokens are decoded, so that it is still known what that costs."""

DEFAULT_SWITCH = 0.3
"""The time of a switch to verifying and back, in decode steps, as long as none was measured."""

PREFILL_MARGIN = 1.5
"""By how much drafted tokens beside a prompt must bring more than they cost."""

_WORST_SWITCH = 2.0
"""How many decode steps a switch counts at most."""

_ENOUGH_SWITCHES = 3
"""After so many measured switches, the worst of them is the worst one expected."""

_WORST_STEP = 1.5
"""How many times its expected time a step counts at most: more was another program's doing, and would empty the purse
for thousands of tokens. A step that is dearer by itself is known to be so from then on.
"""


@dataclass(frozen=True)
class StepPrices:
    """What the next step costs, in the ledger's unit: a decode step, a decoded token, and how much more a step takes
    that verifies 1, 2, .. drafted tokens.
    """

    decode: float
    """A decode step of the rows."""
    token: float
    """A decoded token of the rows."""
    costs: Sequence[float]
    """See `choose_draft_lengths`."""
    purse: LossBudget
    risk: float = 0.0
    """How much more it may cost than is expected."""

    @property
    def can_pay(self) -> bool:
        """Whether verifying some number of drafts is faster than decoding if all of them are right."""
        return any(count * self.token > cost for count, cost in enumerate(self.costs, 1))

    def allows(self, cost: float, certain: float) -> bool:
        """Return whether a step may cost that much more if only `certain` drafted tokens are right."""
        return self.purse.allows((cost + self.risk) / self.token - certain)


class TimeLedger:
    """Learns what a scheduler's steps cost, and keeps the budget of time that drafting may lose.

    An *excursion* leads from pipelined decoding to verifying steps and back. It costs a switch: the pipeline is
    emptied, the tail is flushed early, and the pipeline is filled again.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.costs = StepCosts()
        self.purse = LossBudget()
        self._scheduler = scheduler
        self.tokens = 0
        """Tokens that all steps have brought."""
        self._asking = 0.0
        self._out = False
        self._switched = False
        self._lost = 0.0
        self._early = 0.0
        self._unseen = 0
        self._switches: deque[float] = deque(maxlen=9)

    @property
    def switch_cost(self) -> float:
        """The cost of a switch from decoding to verifying and back, in decode steps."""
        return median_low(self._switches) if self._switches else DEFAULT_SWITCH

    def to_units(self, seconds: float) -> float:
        """Convert seconds to the ledger's unit of time."""
        return seconds / self.costs.unit

    def estimate_prices(self, rows: int, drafts: int, pending: bool) -> StepPrices | None:
        """Return what verifying 1, 2, .. `drafts` tokens of `rows` rows costs; None while that is unknown. If steps
        are `pending`, the pipeline must be emptied first.
        """
        decode = self.costs.decode_time(rows)
        if decode is None or self._unseen > MOST_UNSEEN_STEPS:
            return None
        token = decode / rows
        if self._scheduler.is_prefilling:
            rate = self._scheduler.costs.seconds_per_token
            if rate is None:
                return None
            each = PREFILL_MARGIN * rate / self.costs.unit
            return StepPrices(decode, token, [each * count for count in range(1, drafts + 1)], self.purse)
        switch = self.switch_cost * decode - decode if pending else -decode
        costs = [time + switch for time in self.costs.verify_times(rows, drafts, decode)]
        return StepPrices(decode, token, costs, self.purse, self._worst_overrun(rows, pending) * decode)

    def _worst_overrun(self, rows: int, pending: bool) -> float:
        """Return how many decode steps more than expected verifying may cost; 0 if such a loss is small enough. With
        many rows, one bad surprise is more than may be lost.
        """
        if not self.costs.has_verify_times(rows):
            worst = _WORST_SWITCH
        elif pending:
            worst = max(self._switches) if len(self._switches) >= _ENOUGH_SWITCHES else _WORST_SWITCH
        else:
            return 0.0
        return worst if worst * rows > BUDGET_CAP else 0.0

    def begin_verifying(self, pending: bool) -> None:
        """Note that the next step verifies drafts. If steps are `pending`, this takes a switch."""
        if not self._out:
            self._out, self._switched, self._lost = True, pending, 0.0

    def add_drafting_time(self, seconds: float) -> None:
        """Note that drafters took `seconds` to guess, which are a part of the next step's time."""
        self._asking += seconds

    def record_step(self, plan: StepPlan, seconds: float, accepted: int) -> None:
        """Learn from a step that took `seconds` and accepted `accepted` drafted tokens."""
        asking, self._asking = self._asking, 0.0
        alone = max(seconds - asking, 0.0)
        rows = sum([segment.live for segment in plan.logit_segments])
        drafted = len(plan.logit_rows) - len(plan.logit_segments)
        self.tokens += rows + accepted
        self.purse.refill(rows + accepted)
        if not rows:
            return
        newest = plan.number == self._scheduler.planned_steps
        ahead = plan.tokens is None
        if plan.kind is StepKind.DECODE and (not self._scheduler.config.pipeline or (ahead and not newest)):
            if rows == len(plan.logit_segments):
                self.costs.record_decode(rows, alone)
            self._end_verifying(rows, asking)
            return
        decode = self.costs.decode_time(rows)
        if decode is None:
            return
        token = decode / rows
        took = seconds / self.costs.unit
        if plan.kind is StepKind.DECODE:
            self._record_pipeline_edge(took / token - rows, rows, ahead)
        elif any(len(segment.logits) < segment.count for segment in plan.segments):
            rate = self._scheduler.costs.seconds_per_token or 0.0
            self.purse.add(accepted - drafted * rate / self.costs.unit / token)
        elif drafted:
            expected = self.costs.verify_times(rows, drafted, decode)[-1]
            self.costs.record_verify(rows, rows + drafted, alone)
            self._unseen += 1
            self.purse.add(rows + accepted - min(took, _WORST_STEP * expected) / token)

    def _record_pipeline_edge(self, late: float, rows: int, ahead: bool) -> None:
        """Charge the delay of a decode step with which the pipeline drains or fills. Its tokens came so much `late`,
        in the time of a token. Much of the last one's time is counted in the step before, and as much more in the
        next first one.
        """
        if ahead:
            self._early = min(max(-late, 0.0), float(rows))
            late = max(late, 0.0)
        else:
            late -= self._early
            self._early = 0.0
        if self._out:
            late = min(late, _WORST_SWITCH * rows)
            self._lost += late
            self.purse.add(-late)

    def _end_verifying(self, rows: int, asking: float) -> None:
        """Note that decode steps run ahead again, and what the switch cost. Drafters took `asking` seconds of the
        newest step.
        """
        self._unseen = 0
        if asking and (decode := self.costs.decode_time(rows)):
            self.purse.add(-asking / self.costs.unit / decode * rows)
        if self._out and self._switched:
            self._switches.append(min(max(self._lost / rows, 0.0), _WORST_SWITCH))
        self._out = False


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


class TimeEstimate:
    """The median of the newest time measurements of one kind of step."""

    def __init__(self) -> None:
        self.seen = 0
        self._values: deque[float] = deque(maxlen=_NEWEST)
        self._median: float | None = None

    def add(self, value: float, now: int) -> None:
        """Add a measurement that was made at step `now`."""
        self._values.append(value)
        self._median = None
        self.seen = now

    def is_fresh(self, now: int) -> bool:
        """Return whether the newest measurement is recent enough at step `now` to be believed."""
        return now - self.seen <= (_LATE if len(self._values) >= _FIRM else _SOON)

    @property
    def value(self) -> float:
        """The median of the measurements; the lower one of two."""
        if self._median is None:
            self._median = median_low(self._values)
        return self._median


class StepCosts:
    """Estimates how long steps take: decode steps by rows, and steps that verify drafts by rows and tokens.

    All times are in units of the machine's speed, which is followed apart: if other programs slow the machine down for
    a while, all estimates stay comparable. `unit` is that speed: multiply by it for seconds.
    """

    def __init__(self) -> None:
        self.unit = 1.0
        self.now = 0
        self._decoding: dict[int, TimeEstimate] = {}
        self._verifying: dict[int, dict[int, TimeEstimate]] = {}
        self._of_any: dict[int, TimeEstimate] = {}

    def record_decode(self, rows: int, seconds: float) -> None:
        """Learn that a decode step of `rows` rows took `seconds`, while others ran before and after it."""
        self._record([self._decoding.setdefault(round_to_bucket(rows), TimeEstimate())], seconds, _BY_DECODE)

    def record_verify(self, rows: int, tokens: int, seconds: float) -> None:
        """Learn that a step of `rows` rows and `tokens` tokens, drafts among them, took `seconds`."""
        own = self._verifying.setdefault(round_to_bucket(rows), {})
        key = round_to_bucket(tokens)
        self._record(
            [own.setdefault(key, TimeEstimate()), self._of_any.setdefault(key, TimeEstimate())], seconds, _BY_VERIFY
        )

    def _record(self, estimates: list[TimeEstimate], seconds: float, weight: float) -> None:
        """Add a measurement to the estimates. The machine's speed follows it by `weight`."""
        self.now += 1
        first = estimates[0]
        if first.seen:
            surprise = seconds / (self.unit * first.value)
            self.unit *= min(max(surprise, 1 / _MOST), _MOST) ** weight
        for estimate in estimates:
            estimate.add(max(seconds, 1e-9) / self.unit, self.now)

    def decode_time(self, rows: int) -> float | None:
        """Return the time of a decode step of `rows` rows; None if it is unknown."""
        estimate = self._decoding.get(round_to_bucket(rows))
        return None if estimate is None else estimate.value

    def verify_times(self, rows: int, drafted: int, decode: float) -> list[float]:
        """Return the times of steps of `rows` rows that verify 1, 2, .. `drafted` tokens, or fewer: at most twice as
        many as were measured, so that no try costs far more than expected. `decode` is the time of a decode step of
        these rows.
        """
        first = max(FIRST, FIRST_OF_ROW * rows)
        if known := self._known_verify_times(rows):
            return _interpolate_times(known, rows, min(drafted, max(first, 2 * (max(known) - rows))), decode)
        return [decode + _prior_slope(rows, decode) * more for more in range(1, min(drafted, first) + 1)]

    def has_verify_times(self, rows: int) -> bool:
        """Return whether the time of a verifying step of more tokens than `rows` is known."""
        return bool(self._known_verify_times(rows))

    def _known_verify_times(self, rows: int) -> dict[int, float]:
        """Return the known times of verifying steps by tokens: of these rows, or else of any rows."""
        for estimates in (self._verifying.get(round_to_bucket(rows), {}), self._of_any):
            known = {at: e.value for at, e in estimates.items() if at > rows and e.is_fresh(self.now)}
            if known:
                return known
        return {}


def _interpolate_times(known: dict[int, float], rows: int, drafted: int, decode: float) -> list[float]:
    """Return the times of steps with 1, 2, .. `drafted` tokens more than rows, interpolated between the `known` ones.
    The line begins with a decode step.
    """
    places = sorted(known)
    below, low, reached = rows, decode, 0
    times = []
    for tokens in range(rows + 1, rows + drafted + 1):
        while reached < len(places) and places[reached] <= tokens:
            below, low = places[reached], known[places[reached]]
            reached += 1
        if below == round_to_bucket(tokens):
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
    """Return the assumed time of each further token, as long as none was measured."""
    return min(PRIOR_SLOPE, PRIOR_SHARE / rows) * decode


def round_to_bucket(count: int) -> int:
    """Return the least number that shares an estimate with `count`."""
    if count <= _EXACT:
        return count
    grain = 1 << (count.bit_length() - 4)
    return count // grain * grain


# LossBudget: how much time drafting may still lose. It bounds what any text can make drafting cost.


BUDGET_CAP = 22.0
"""The most that can be lost in one go, in the time of so many decoded tokens."""

BUDGET_REFILL = 0.004
"""How much comes in with each token, whatever it cost."""

BUDGET_START = 10.0
"""What there is at first: the first tries of a machine cost something, too."""


class LossBudget:
    """The time that drafting may still lose, in units of a decoded token's time. Losses are taken out, gains are put
    in up to `BUDGET_CAP`, and it refills slowly with each token.

    A step is allowed if there is enough for its worst case. So within any n tokens, drafting loses at most
    `BUDGET_CAP + BUDGET_REFILL * n`, as far as its estimates of steps are right: for 1,000 tokens that is 2.6 %.
    """

    def __init__(self) -> None:
        self.level = BUDGET_START

    def allows(self, loss: float) -> bool:
        """Return whether the budget allows a step that may lose `loss`."""
        return loss <= max(self.level, 0.0)

    def add(self, tokens: float) -> None:
        """Add the time that a step has won, in decoded tokens. A loss is negative."""
        self.level = min(self.level + tokens, BUDGET_CAP)

    def refill(self, tokens: int) -> None:
        """Refill the budget a little, after `tokens` new tokens."""
        self.add(BUDGET_REFILL * tokens)
