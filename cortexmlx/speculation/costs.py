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

MIN_UNSEEN_TOKENS, MAX_UNSEEN_TOKENS = 64, 1024
"""After so many tokens of verifying steps some are decoded, to see what that costs: the lower number at first, and four
times as many each time that it costs what was believed. A busy moment that ends just when verifying begins flatters it.
"""

SAME_SPEED = 1.2
"""Up to this factor, speeds are the same. If verifying steps change theirs by more, some tokens are decoded, too."""

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
    """Times in the ledger's unit: of a decode step, of a token, and the extra time to verify 1, 2, .. drafts."""

    decode_time: float
    """A decode step of the rows."""
    token_time: float
    """A decoded token of the rows."""
    verify_costs: Sequence[float]
    """See `choose_draft_lengths`."""
    loss_budget: LossBudget
    risk: float = 0.0
    """How much more it may cost than is expected."""

    @property
    def can_pay(self) -> bool:
        """Whether verifying some number of drafts is faster than decoding if all of them are right."""
        return any(count * self.token_time > cost for count, cost in enumerate(self.verify_costs, 1))

    def allows(self, cost: float, certain_tokens: float) -> bool:
        """Return whether a step may cost `cost` more than decoding if only `certain_tokens` drafts are right."""
        return self.loss_budget.allows((cost + self.risk) / self.token_time - certain_tokens)


class TimeLedger:
    """Learns what a scheduler's steps cost, and keeps the budget of time that drafting may lose.

    An *excursion* leads from pipelined decoding to verifying steps and back. It costs a switch: the pipeline is
    emptied, the tail is flushed early, and the pipeline is filled again.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.costs = StepCosts()
        self.loss_budget = LossBudget()
        self._scheduler = scheduler
        self.tokens = 0
        """Tokens that all steps have brought."""
        self._drafting_seconds = 0.0
        self._in_excursion = False
        self._includes_switch = False
        self._lost_time = 0.0
        self._early_time = 0.0
        self._unseen_tokens, self._max_unseen_tokens, self._unit_of_decode = 0, MIN_UNSEEN_TOKENS, 1.0
        self._speed_is_confirmed = True
        self._stretch = ((0, False), 0, 0.0)
        """The decode steps since another kind of step: their rows and whether the head ran, number, and seconds."""
        self._switches: deque[float] = deque(maxlen=9)

    @property
    def switch_cost(self) -> float:
        """The cost of a switch from decoding to verifying and back, in decode steps."""
        return median_low(self._switches) if self._switches else DEFAULT_SWITCH

    def to_units(self, seconds: float) -> float:
        """Convert seconds to the ledger's unit of time."""
        return seconds / self.costs.unit

    def estimate_prices(self, rows: int, drafts: int, pending: bool) -> StepPrices | None:
        """Return the prices to verify up to `drafts` tokens of `rows` rows; None: unknown. `pending` adds a drain."""
        decode_time = self.costs.decode_time(rows)
        if decode_time is None or self._is_decode_time_old:
            return None
        self.loss_budget.cover(rows)
        token_time = decode_time / rows
        if self._scheduler.is_prefilling:
            rate = self._scheduler.cost_model.seconds_per_token
            if rate is None:
                return None
            token_cost = PREFILL_MARGIN * rate / self.costs.unit
            return StepPrices(
                decode_time, token_time, [token_cost * count for count in range(1, drafts + 1)], self.loss_budget
            )
        switch = self.switch_cost * decode_time - decode_time if pending else -decode_time
        verify_costs = [time + switch for time in self.costs.verify_times(rows, drafts, decode_time)]
        return StepPrices(
            decode_time, token_time, verify_costs, self.loss_budget, self._worst_overrun(rows, pending) * decode_time
        )

    @property
    def _is_decode_time_old(self) -> bool:
        """Whether decoding is to be timed again: after much verifying, or after any if the machine's speed changed."""
        speed_changed = not is_same_speed(self.costs.unit, self._unit_of_decode)
        return self._unseen_tokens > (0 if speed_changed else self._max_unseen_tokens)

    def _worst_overrun(self, rows: int, pending: bool) -> float:
        """Return by how many decode steps verifying may exceed its expected cost at worst; 0 if the loss budget covers
        that. With many rows, one bad surprise can cost more than the whole budget.
        """
        if not self.costs.has_verify_times(rows):
            worst_switch = _WORST_SWITCH
        elif pending:
            worst_switch = max(self._switches) if len(self._switches) >= _ENOUGH_SWITCHES else _WORST_SWITCH
        else:
            return 0.0
        return worst_switch if worst_switch * rows > BUDGET_CAP else 0.0

    def begin_excursion(self, pending: bool) -> None:
        """Begin to time an excursion (see above) unless one is open. It has a switch if decode steps are `pending`."""
        if not self._in_excursion:
            self._in_excursion, self._includes_switch, self._lost_time = True, pending, 0.0

    def add_drafting_time(self, seconds: float) -> None:
        """Add the `seconds` that a drafter took. They are a part of the next step's time."""
        self._drafting_seconds += seconds

    def record_step(self, plan: StepPlan, seconds: float, num_accepted: int) -> None:
        """Learn from a step that took `seconds` and accepted `num_accepted` drafted tokens."""
        drafting_seconds, self._drafting_seconds = self._drafting_seconds, 0.0
        step_seconds = max(seconds - drafting_seconds, 0.0)
        rows = sum([segment.live for segment in plan.logit_segments])
        num_drafted = len(plan.logit_rows) - len(plan.logit_segments)
        self.tokens += rows + num_accepted
        self.loss_budget.refill(rows + num_accepted)
        if not rows:
            return
        (stretch_rows, head_ran), steps, stretch_seconds = self._stretch
        if plan.kind is not StepKind.DECODE:
            if stretch_rows == rows:
                self._learn_from_stretch(rows, head_ran, steps, stretch_seconds)
            self._stretch = ((0, False), 0, 0.0)
        elif (stretch_rows, head_ran) == (rows, plan.runs_head):
            self._stretch = ((rows, head_ran), steps + 1, stretch_seconds + step_seconds)
        else:
            self._stretch = ((rows, plan.runs_head), 1, step_seconds)
        is_newest = plan.number == self._scheduler.planned_steps
        planned_ahead = plan.tokens is None
        if plan.kind is StepKind.DECODE and (not self._scheduler.config.pipeline or (planned_ahead and not is_newest)):
            if rows == len(plan.logit_segments):
                self._record_decode(rows, step_seconds, plan.runs_head)
                if with_head := self.costs.decode_time(rows, plan.runs_head):
                    without = self.costs.decode_time(rows) or with_head
                    self.loss_budget.add_gain(min(1 - with_head / without, 0.0) * rows)
            self._end_excursion(rows, drafting_seconds)
            return
        decode_time = self.costs.decode_time(rows)
        if decode_time is None:
            return
        token_time = decode_time / rows
        step_units = seconds / self.costs.unit
        if plan.kind is StepKind.DECODE:
            self._record_pipeline_edge(step_units / token_time - rows, rows, planned_ahead)
        elif any(len(segment.logits) < segment.count for segment in plan.segments):
            rate = self._scheduler.cost_model.seconds_per_token or 0.0
            self.loss_budget.add_gain(num_accepted - num_drafted * rate / self.costs.unit / token_time)
        elif num_drafted:
            expected_units = self.costs.verify_times(rows, num_drafted, decode_time)[-1]
            self.costs.record_verify(rows, rows + num_drafted, step_seconds)
            self._unseen_tokens += rows + num_accepted
            self.loss_budget.add_gain(rows + num_accepted - min(step_units, _WORST_STEP * expected_units) / token_time)

    def _record_pipeline_edge(self, delay: float, rows: int, planned_ahead: bool) -> None:
        """Charge the loss budget for a decode step that drains or fills the pipeline. Its tokens came later by `delay`,
        in units of a token's time. The step that drains seems too quick, since the step before has a part of its
        time; the step that fills seems too slow by as much.
        """
        if planned_ahead:
            self._early_time = min(max(-delay, 0.0), float(rows))
            delay = max(delay, 0.0)
        else:
            delay -= self._early_time
            self._early_time = 0.0
        if self._in_excursion:
            delay = min(delay, _WORST_SWITCH * rows)
            self._lost_time += delay
            self.loss_budget.add_gain(-delay)

    def _record_decode(self, rows: int, seconds: float, head_ran: bool) -> None:
        """Record a decode step's time, and after how many more verified tokens decoding is timed again."""
        self._speed_is_confirmed = self.costs.record_decode(rows, seconds, head_ran)
        if self._unseen_tokens:
            went_on = self._speed_is_confirmed and self._unseen_tokens > self._max_unseen_tokens
            self._max_unseen_tokens = (
                min(4 * self._max_unseen_tokens, MAX_UNSEEN_TOKENS) if went_on else MIN_UNSEEN_TOKENS
            )
        self._unseen_tokens, self._unit_of_decode = 0, self.costs.unit

    def _learn_from_stretch(self, rows: int, head_ran: bool, steps: int, seconds: float) -> None:
        """Record a decode step's time, estimated from `steps` of them in `seconds`, which include part of a switch."""
        if (decode_time := self.costs.decode_time(rows, head_ran)) is not None:
            expected = decode_time * self.costs.unit
            least = (seconds - self.switch_cost * expected) / steps
            self._record_decode(rows, min(max(expected, least), seconds / steps), head_ran)

    def _end_excursion(self, rows: int, drafting_seconds: float) -> None:
        """End the excursion, if one is open, since decode steps run ahead again. Record the cost of its switch, and
        charge the loss budget for the newest step's `drafting_seconds`."""
        if drafting_seconds and (decode_time := self.costs.decode_time(rows)):
            self.loss_budget.add_gain(-drafting_seconds / self.costs.unit / decode_time * rows)
        if self._in_excursion and self._includes_switch and self._speed_is_confirmed:
            self._switches.append(min(max(self._lost_time / rows, 0.0), _WORST_SWITCH))
        self._in_excursion = False


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

_SOON, _LATE = 100, 4000
"""After how many steps an estimate of fewer, or of at least `_FIRM` measurements is forgotten, so that it is tried
again.
"""

_BY_NEWEST, _MAX_SURPRISE = 0.5, 2.0
"""How quickly the machine's speed follows the newest step, and how much of a surprise counts."""


class TimeEstimate:
    """The median of the newest time measurements of one kind of step."""

    def __init__(self) -> None:
        self.last_step = 0
        self._values: deque[float] = deque(maxlen=_NEWEST)
        self._median: float | None = None

    def add(self, value: float, now: int) -> None:
        """Add a measurement that was made at step `now`."""
        self._values.append(value)
        self._median = None
        self.last_step = now

    def drop(self, value: float) -> None:
        """Remove a measurement if it is among the newest."""
        if value in self._values:
            self._values.remove(value)
            self._median = None

    def is_fresh(self, now: int) -> bool:
        """Return whether the newest measurement is recent enough at step `now` to be believed."""
        return bool(self._values) and now - self.last_step <= (_LATE if len(self._values) >= _FIRM else _SOON)

    def is_firm(self, now: int) -> bool:
        """Return whether there are enough measurements, and the newest is recent at step `now`."""
        return len(self._values) >= _FIRM and self.is_fresh(now)

    @property
    def value(self) -> float:
        """The median of the measurements: of an even number, the lower one of the two in the middle."""
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
        self._decode_estimates: dict[tuple[int, bool], TimeEstimate] = {}
        self._verify_estimates: dict[int, dict[int, TimeEstimate]] = {}
        self._any_rows_estimates: dict[int, TimeEstimate] = {}
        self._newest_verify: Sequence[TimeEstimate] = ()
        self._newest_seconds = 0.0
        """The estimates of a verifying step since the last decode step, and its time."""
        self._unconfirmed: list[tuple[TimeEstimate, float]] = []
        """What was learned from verifying steps since."""

    def record_decode(self, rows: int, seconds: float, head_ran: bool = False) -> bool:
        """Record the time of a pipelined decode step of `rows` rows, with the draft head if `head_ran`. Return whether
        the machine's speed is the same as in the verifying steps just before. If not, their measurements are dropped.
        The newest verifying step, which is close in time, is measured again by this step's speed.
        """
        estimate = self._decode_estimates.setdefault((round_to_bucket(rows), head_ran), TimeEstimate())
        unit = self.unit
        self._record([estimate], seconds)
        near_unit = max(seconds, 1e-9) / estimate.value
        is_confirmed = is_same_speed(near_unit, unit)
        for verify_estimate, value in () if is_confirmed else self._unconfirmed:
            verify_estimate.drop(value)
        for verify_estimate in self._newest_verify:
            verify_estimate.add(self._newest_seconds / near_unit, self.now)
        self._newest_verify, self._unconfirmed = (), []
        return is_confirmed

    def record_verify(self, rows: int, tokens: int, seconds: float) -> None:
        """Record the time of a verifying step of `rows` rows and `tokens` tokens, drafts included. It updates the
        machine's speed and estimates that are not firm; the next `record_decode` updates firm ones, too.
        """
        row_estimates, key = self._verify_estimates.setdefault(round_to_bucket(rows), {}), _verify_bucket(rows, tokens)
        estimates = [each.setdefault(key, TimeEstimate()) for each in (row_estimates, self._any_rows_estimates)]
        unknown = [estimate for estimate in estimates if not estimate.is_firm(self.now)]
        value = self._record(unknown, seconds, estimates[0])
        self._unconfirmed += [(estimate, value) for estimate in unknown]
        self._newest_verify, self._newest_seconds = estimates, max(seconds, 1e-9)

    def _record(self, estimates: list[TimeEstimate], seconds: float, first: TimeEstimate | None = None) -> float:
        """Adapt the machine's speed to a step that took `seconds`. `first` is the estimate that predicted it (None: the
        first of `estimates`). Add the step's time, in units of the speed, to `estimates`, and return it.
        """
        self.now += 1
        first = first or estimates[0]
        if first.is_fresh(self.now):
            surprise = seconds / (self.unit * first.value)
            self.unit *= min(max(surprise, 1 / _MAX_SURPRISE), _MAX_SURPRISE) ** _BY_NEWEST
        for estimate in estimates:
            estimate.add(max(seconds, 1e-9) / self.unit, self.now)
        return max(seconds, 1e-9) / self.unit

    def decode_time(self, rows: int, head_ran: bool = False) -> float | None:
        """Return the time of a decode step of `rows` rows, with or without the draft head; None if it is unknown."""
        key = round_to_bucket(rows)
        estimate = self._decode_estimates.get((key, head_ran)) or self._decode_estimates.get((key, not head_ran))
        return None if estimate is None else estimate.value

    def verify_times(self, rows: int, max_drafts: int, decode_time: float) -> list[float]:
        """Return the times of steps of `rows` rows that verify 1, 2, .. `max_drafts` tokens. The list ends at twice as
        many drafts as were measured, so that no try costs far more than expected. `decode_time` is the time of a decode
        step of these rows.
        """
        first_limit = max(FIRST, FIRST_OF_ROW * rows)
        if known_times := self._known_verify_times(rows):
            return _interpolate_times(
                known_times, rows, min(max_drafts, max(first_limit, 2 * (max(known_times) - rows))), decode_time
            )
        return [
            decode_time + _prior_slope(rows, decode_time) * extra_tokens
            for extra_tokens in range(1, min(max_drafts, first_limit) + 1)
        ]

    def has_verify_times(self, rows: int) -> bool:
        """Return whether the time of any step that verifies drafts of `rows` rows is known."""
        return bool(self._known_verify_times(rows))

    def _known_verify_times(self, rows: int) -> dict[int, float]:
        """Return known times of verifying steps by number of tokens: of `rows` rows, or else of any number of rows."""
        for estimates in (self._verify_estimates.get(round_to_bucket(rows), {}), self._any_rows_estimates):
            known_times = {
                tokens: estimate.value
                for tokens, estimate in estimates.items()
                if tokens > rows and estimate.is_fresh(self.now)
            }
            if known_times:
                return known_times
        return {}


def _interpolate_times(known_times: dict[int, float], rows: int, max_drafts: int, decode_time: float) -> list[float]:
    """Return step times for `rows` + 1, 2, .. `max_drafts` tokens, interpolated from `known_times` by tokens."""
    known_tokens = sorted(known_times)
    lower_tokens, lower_time, index = rows, decode_time, 0
    times = []
    for tokens in range(rows + 1, rows + max_drafts + 1):
        while index < len(known_tokens) and known_tokens[index] <= tokens:
            lower_tokens, lower_time = known_tokens[index], known_times[known_tokens[index]]
            index += 1
        if lower_tokens == _verify_bucket(rows, tokens):
            times.append(max(lower_time, decode_time / 2))
            continue
        if index < len(known_tokens):
            upper_tokens = known_tokens[index]
            slope = (known_times[upper_tokens] - lower_time) / (upper_tokens - lower_tokens)
        else:
            slope = max((lower_time - decode_time) / (lower_tokens - rows), _prior_slope(rows, decode_time))
        times.append(max(OPTIMISM * (lower_time + slope * (tokens - lower_tokens)), decode_time / 2))
    return times


def _prior_slope(rows: int, decode_time: float) -> float:
    """Return the assumed time of each drafted token in a verifying step, while none was measured."""
    return min(PRIOR_SLOPE, PRIOR_SHARE / rows) * decode_time


def is_same_speed(unit: float, other: float) -> bool:
    """Return whether two speeds of the machine are about the same."""
    return 1 / SAME_SPEED < unit / other < SAME_SPEED


def round_to_bucket(count: int) -> int:
    """Round a number of rows or tokens down to the least one that shares an estimate with it."""
    if count <= _EXACT:
        return count
    grain = 1 << (count.bit_length() - 4)
    return count // grain * grain


def _verify_bucket(rows: int, tokens: int) -> int:
    """Round a verifying step's `tokens` down to the least number that shares an estimate, but above `rows`."""
    return max(round_to_bucket(tokens), rows + 1)


# LossBudget: how much time drafting may still lose. It bounds what any text can make drafting cost.


BUDGET_CAP = 22.0
"""The most that can be lost in one go, in the time of so many decoded tokens."""

BUDGET_CAP_STEPS = 3.0
"""With many rows it is this many decode steps instead, or else the worst first try would be more than may be lost."""

BUDGET_REFILL = 0.004
"""How much comes in with each token, whatever it cost."""

BUDGET_START = 10.0
"""What there is at first: the first tries of a machine cost something, too."""


class LossBudget:
    """The time that drafting may still lose, in units of a decoded token's time. Losses are taken out, gains are put
    in up to `BUDGET_CAP`, and it refills slowly with each token.

    A step is allowed if there is enough for its worst case. So within any n tokens, drafting loses at most
    `cap + BUDGET_REFILL * n`, as far as its estimates of steps are right: for 1,000 tokens of few rows that is 2.6 %.
    """

    def __init__(self) -> None:
        self.level = BUDGET_START
        self.cap = BUDGET_CAP

    def cover(self, rows: int) -> None:
        """Raise the cap, and the level by as much, if steps of `rows` rows need it. The cap never falls."""
        more = max(BUDGET_CAP_STEPS * rows - self.cap, 0.0)
        self.cap += more
        self.level += more

    def allows(self, loss: float) -> bool:
        """Return whether the budget allows a step that may lose `loss`."""
        return loss <= max(self.level, 0.0)

    def add_gain(self, token_times: float) -> None:
        """Add what a step gained over plain decoding, in times of a decoded token. A loss is negative."""
        self.level = min(self.level + token_times, self.cap)

    def refill(self, tokens: int) -> None:
        """Refill the budget a little, after `tokens` new tokens."""
        self.add_gain(BUDGET_REFILL * tokens)
