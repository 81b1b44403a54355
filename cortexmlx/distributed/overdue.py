"""OverdueCalls: which ranks have not answered for longer than calls of their kind take. Without mlx.

Heartbeats come from a thread beside the work, so they go on while the work hangs. Neither a graph that is evaluated nor
a GPU tells how far it is. Only time shows that it hangs, and the bound is what calls alike took before:

- A call may take `HangLimits.seconds`, or `LONGER` times as long as the longest call alike, whichever is more. What is
  remembered as the longest fades with each call, so that one slow step does not loosen the bound for ever.
- Steps are alike if the work of one is at most twice that of the other. Where none like it was seen, those with more
  work tell. If there are none either, or if the last one was long ago (the system may have moved the weights out of
  memory since), the call may take `HangLimits.first_seconds`: kernels may have to be compiled.
- What moves or allocates much may always take `HangLimits.first_seconds`: the system may have to make room.
- To open a part of a model may take any time: the disk decides.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from cortexmlx.distributed.messages import (
    AnyCall,
    Arrange,
    Begin,
    Choose,
    Close,
    Collect,
    Copy,
    Dispatch,
    Forward,
    Open,
    Prepare,
    Resize,
)
from cortexmlx.kv.spec import Counts
from cortexmlx.scheduling.plan import StepPlan

HANG_SWITCH = "CORTEXMLX_HANG_SECONDS"
"""The environment variable with the seconds after which a worker may count as hanging; 0: it never does."""

LONGER = 10
"""How many times as long as the longest call alike a call may take."""

ENOUGH = 8
"""After how many calls alike it is known how long they take: those of four steps."""

PAUSE_SECONDS = 60.0
"""After such a pause, it is not known any more."""

_FADES = 0.99
"""What is left of the longest time after one more call."""

_LENGTH = 4096
"""Tokens of context at which a token's attention counts as much as all else of it. With most models it is farther: this
gives more time.
"""

_IDLE, _BUSY = 0.2, 0.1
"""A rank that used at most the first share of the processor time of every other one, each of which used at least the
second share of the time, is the one that hangs: who waits for numbers of others keeps asking for them.
"""


@dataclass(frozen=True)
class HangLimits:
    """When a rank hangs that has not answered a call."""

    seconds: float = 7.0
    """No call is overdue sooner. 0: none ever is."""
    first_seconds: float = 300.0
    """What a call may take if it is not known how long such calls take."""


DEFAULT_HANG_LIMITS = HangLimits()


@dataclass(frozen=True)
class Overdue:
    """A call that takes too long."""

    ranks: tuple[int, ...]
    """Who has not answered it."""
    seconds: float
    """How long they have been at it."""
    usual: float | None
    """The longest time of calls alike, as remembered; None: it is not known."""
    used: tuple[float | None, ...]
    """Seconds of processor time that each of `ranks` has used meanwhile, as far as heartbeats told."""

    @property
    def culprit(self) -> int | None:
        """The rank that hangs; None: it cannot be told. If the others have answered, it is the one that has not."""
        if len(self.ranks) == 1:
            return self.ranks[0]
        told = sorted((used, rank) for used, rank in zip(self.used, self.ranks, strict=True) if used is not None)
        if len(told) < len(self.ranks):
            return None
        (least, rank), (next_, _) = told[:2]
        return rank if least <= _IDLE * next_ and next_ >= _BUSY * self.seconds else None


@dataclass
class _Kind:
    """Calls alike."""

    count: int = 0
    """How many answers there were, of all ranks."""
    longest: float = 0.0
    at: float = 0.0
    """When the last one was answered."""


@dataclass
class _Rank:
    """What a rank has to answer."""

    open: deque[tuple[int, int | None, float]] = field(default_factory=deque)
    """The number of each call, its kind, and when it was sent, the oldest first."""
    answered: float = 0.0
    """When it answered last."""
    suspected: int | None = None
    """The call that was overdue at the last look."""
    noted: tuple[int, float | None] | None = None
    """A call, and the processor time that the rank had used when it was first seen to be waited for."""

    def since(self) -> float:
        """When the rank may have begun with its oldest call."""
        return max(self.open[0][2], self.answered)


_MOVES, _SMALL = -1, -2
"""The kinds of calls that are no steps: those that may move or allocate much, and all others."""


class OverdueCalls:
    """Takes every call that is sent and every answer, with times of one clock. Not safe for several threads."""

    def __init__(self, ranks: int, limits: HangLimits) -> None:
        self._limits = limits
        self._ranks = [_Rank() for _ in range(ranks)]
        self._kinds: dict[int, _Kind] = {}
        self._newest: tuple[int, int | None] = 0, None
        self._step = 0
        self._blocks: Counts = ()

    def note_call(self, rank: int, number: int, asks: AnyCall, now: float) -> None:
        """Note a call. Calls of one number are of one kind."""
        if number != self._newest[0]:
            self._newest = number, self._kind(asks)
        self._ranks[rank].open.append((number, self._newest[1], now))

    def note_answer(self, rank: int, now: float) -> None:
        """Note the answer to a rank's oldest call, and learn how long it took."""
        of = self._ranks[rank]
        if not of.open:
            return
        began = of.since()
        _, kind, _ = of.open.popleft()
        of.answered, of.suspected, of.noted = now, None, None
        if kind is not None:
            alike = self._kinds.setdefault(kind, _Kind())
            alike.count += 1
            alike.longest = max(alike.longest * _FADES ** (1 / len(self._ranks)), now - began)
            alike.at = now

    def look(self, now: float, used: Sequence[float | None]) -> Overdue | None:
        """Return the oldest call, if it is overdue as it was at the last look. `used`: seconds of processor time that
        each rank has used so far. Call it several times a second while answers are awaited, after those that are there
        were taken: if this process itself was stopped for long, the answers come between two looks.
        """
        waiting = [rank for rank, of in enumerate(self._ranks) if of.open]
        oldest = min((self._ranks[rank].open[0][0] for rank in waiting), default=0)
        behind = [rank for rank in waiting if self._ranks[rank].open[0][0] == oldest]
        overdue = False
        for rank in behind:
            of = self._ranks[rank]
            if of.noted is None or of.noted[0] != oldest:
                of.noted = oldest, used[rank]
            late = now - of.since() > self._limit(of)
            overdue |= late and of.suspected == oldest
            of.suspected = oldest if late else None
        if not overdue:
            return None
        return Overdue(
            tuple(behind),
            max(now - self._ranks[rank].since() for rank in behind),
            self._usual(self._ranks[behind[0]]),
            tuple(self._used(rank, used[rank]) for rank in behind),
        )

    def _used(self, rank: int, used: float | None) -> float | None:
        noted = self._ranks[rank].noted
        return None if used is None or noted is None or noted[1] is None else used - noted[1]

    def _kind(self, asks: AnyCall) -> int | None:
        """Which calls are alike; None: this one may take any time."""
        match asks:
            case Open() | Close():
                return None
            case Arrange() | Begin() | Resize() | Copy():
                return _MOVES
            case Prepare(plan):
                moves = plan.copies or plan.blocks != self._blocks
                self._take(plan)
                return _MOVES if moves else _SMALL
            case Dispatch(plan) | Forward(plan):
                if plan is not None:
                    self._take(plan)
                return self._step
            case Choose() | Collect():
                return self._step
        return _SMALL

    def _take(self, plan: StepPlan) -> None:
        self._step, self._blocks = work(plan).bit_length(), plan.blocks

    def _limit(self, rank: _Rank) -> float:
        """How long a rank's oldest call may take."""
        kind, least = rank.open[0][1], self._limits.seconds
        if kind is None or least <= 0:
            return math.inf
        usual = self._usual(rank)
        if usual is not None:
            return max(least, LONGER * usual)
        less = (of.longest for each, of in self._kinds.items() if 0 <= each < kind)
        return max(least, self._limits.first_seconds, LONGER * max(less, default=0.0))

    def _usual(self, rank: _Rank) -> float | None:
        """The longest time of calls like a rank's oldest one, or of steps with more work; None if it is not known."""
        kind, began = rank.open[0][1], rank.since()
        if kind is None or kind == _MOVES:
            return None
        known = [
            (each, of.longest)
            for each, of in self._kinds.items()
            if of.count >= ENOUGH * len(self._ranks)
            and began - of.at <= PAUSE_SECONDS
            and (each == kind or each > kind >= 0)
        ]
        return min(known)[1] if known else None


def work(plan: StepPlan) -> int:
    """Return how much a step computes: its tokens, each of which counts more the longer the text before it is."""
    return sum(each.count * (_LENGTH + each.first + each.count) for each in plan.segments) // _LENGTH
