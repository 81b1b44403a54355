"""TimeLedger: what drafting costs and what it has won, from the time of every step. Without mlx or a clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

from cortexmlx.scheduling.plan import StepKind, StepPlan
from cortexmlx.scheduling.scheduler import Scheduler
from cortexmlx.speculation.costs import StepCosts
from cortexmlx.speculation.purse import CAP, Purse

UNSEEN = 128
"""After so many verifying steps some tokens are decoded, so that it is still known what that costs."""

SWITCH = 0.3
"""The time of a switch to verifying and back, in decode steps, as long as none was measured."""

RIDE = 1.5
"""By how much drafted tokens beside a prompt must bring more than they cost."""

_WORST_SWITCH = 2.0
"""How many decode steps a switch counts at most."""

_KNOWN = 3
"""After so many measured switches, the worst of them is the worst one expected."""

_WORST_STEP = 1.5
"""How many times its expected time a step counts at most: more was another program's doing, and would empty the purse
for thousands of tokens. A step that is dearer by itself is known to be so from then on.
"""


@dataclass(frozen=True)
class Prices:
    """What the next step costs, in the ledger's unit."""

    decode: float
    """A decode step of the rows."""
    token: float
    """A decoded token of the rows."""
    costs: Sequence[float]
    """See `lengths.choose`."""
    purse: Purse
    risk: float = 0.0
    """How much more it may cost than is expected."""

    @property
    def can_pay(self) -> bool:
        """Whether a number of drafts pays if all of them are right."""
        return any(count * self.token > cost for count, cost in enumerate(self.costs, 1))

    def allows(self, cost: float, certain: float) -> bool:
        """See `lengths.choose`."""
        return self.purse.allows((cost + self.risk) / self.token - certain)


class TimeLedger:
    """Learns the costs of a scheduler's steps, and keeps the purse.

    An *excursion* leads from pipelined decoding to verifying steps and back. It costs a switch: the pipeline is
    emptied, the tail is flushed early, and the pipeline is filled again.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.costs = StepCosts()
        self.purse = Purse()
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
    def switch(self) -> float:
        """What a switch costs, in decode steps."""
        return median_low(self._switches) if self._switches else SWITCH

    def units(self, seconds: float) -> float:
        """Return seconds in the ledger's unit."""
        return seconds / self.costs.unit

    def prices(self, rows: int, drafts: int, pending: bool) -> Prices | None:
        """Return what verifying 1, 2, .. `drafts` tokens of `rows` rows costs; None while that is not known. If steps
        are `pending`, the pipeline must be emptied.
        """
        decode = self.costs.decode(rows)
        if decode is None or self._unseen > UNSEEN:
            return None
        token = decode / rows
        if self._scheduler.prefilling:
            rate = self._scheduler.costs.seconds_per_token
            if rate is None:
                return None
            each = RIDE * rate / self.costs.unit
            return Prices(decode, token, [each * count for count in range(1, drafts + 1)], self.purse)
        switch = self.switch * decode - decode if pending else -decode
        costs = [time + switch for time in self.costs.verify(rows, drafts, decode)]
        return Prices(decode, token, costs, self.purse, self._risk(rows, pending) * decode)

    def _risk(self, rows: int, pending: bool) -> float:
        """Return how many decode steps more than expected verifying may cost: with many rows, one bad surprise is more
        than may be lost.
        """
        if not self.costs.measured(rows):
            worst = _WORST_SWITCH
        elif pending:
            worst = max(self._switches) if len(self._switches) >= _KNOWN else _WORST_SWITCH
        else:
            return 0.0
        return worst if worst * rows > CAP else 0.0

    def begin(self, pending: bool) -> None:
        """Note that the next step verifies drafts. If steps are `pending`, that takes a switch."""
        if not self._out:
            self._out, self._switched, self._lost = True, pending, 0.0

    def asked(self, seconds: float) -> None:
        """Note that drafters were asked for `seconds`, which are a part of the next step's time."""
        self._asking += seconds

    def took(self, plan: StepPlan, seconds: float, accepted: int) -> None:
        """Learn from a step that took `seconds`, and in which `accepted` drafted tokens were right."""
        asking, self._asking = self._asking, 0.0
        alone = max(seconds - asking, 0.0)
        rows = sum(segment.live for segment in plan.logit_segments)
        drafted = sum(len(segment.logits) - 1 for segment in plan.logit_segments)
        self.tokens += rows + accepted
        self.purse.fill(rows + accepted)
        if not rows:
            return
        newest = plan.number == self._scheduler.steps
        ahead = plan.tokens is None
        if plan.kind is StepKind.DECODE and (not self._scheduler.config.pipeline or (ahead and not newest)):
            if rows == len(plan.logit_segments):
                self.costs.decoded(rows, alone)
            self._returned(rows, asking)
            return
        decode = self.costs.decode(rows)
        if decode is None:
            return
        token = decode / rows
        took = seconds / self.costs.unit
        if plan.kind is StepKind.DECODE:
            self._drain_or_fill(took / token - rows, rows, ahead)
        elif any(len(segment.logits) < segment.count for segment in plan.segments):
            rate = self._scheduler.costs.seconds_per_token or 0.0
            self.purse.put(accepted - drafted * rate / self.costs.unit / token)
        elif drafted:
            expected = self.costs.verify(rows, drafted, decode)[-1]
            self.costs.verified(rows, rows + drafted, alone)
            self._unseen += 1
            self.purse.put(rows + accepted - min(took, _WORST_STEP * expected) / token)

    def _drain_or_fill(self, late: float, rows: int, ahead: bool) -> None:
        """Count a decode step at the end or the beginning of a pipeline, whose tokens came so much `late`, in the time
        of a token. Much of the last one's time is counted in the step before, and as much more in the next first one.
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
            self.purse.put(-late)

    def _returned(self, rows: int, asking: float) -> None:
        """Note that steps run ahead again. In the newest one drafters were asked for `asking` seconds."""
        self._unseen = 0
        if asking and (decode := self.costs.decode(rows)):
            self.purse.put(-asking / self.costs.unit / decode * rows)
        if self._out and self._switched:
            self._switches.append(min(max(self._lost / rows, 0.0), _WORST_SWITCH))
        self._out = False
