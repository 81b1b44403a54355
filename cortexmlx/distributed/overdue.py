"""HangDetector: finds ranks that have not answered for longer than calls of their kind take. Without mlx.

Heartbeats come from a thread beside the work, so they go on while the work hangs. Neither a graph that is evaluated nor
a GPU tells how far it is. Only time shows that it hangs, and the bound is what calls alike took before:

- A call may take `HangLimits.seconds`, or `HANG_FACTOR` times as long as the longest call alike if that is more. What
  is remembered as the longest fades with each call, so that one slow step does not loosen the bound for ever.
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
    Begin,
    Choose,
    Close,
    Collect,
    Copy,
    Dispatch,
    Forward,
    MakeRunner,
    Open,
    Prepare,
    Resize,
)
from cortexmlx.kv.spec import GroupCounts
from cortexmlx.scheduling.plan import StepPlan

HANG_SWITCH = "CORTEXMLX_HANG_SECONDS"
"""The environment variable with the seconds after which a worker may count as hanging; 0: it never does."""

HANG_FACTOR = 10
"""How many times as long as the longest call alike a call may take."""

MIN_SAMPLES = 8
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
    """How long a rank may take to answer a call before it counts as hung."""

    seconds: float = 7.0
    """No call is overdue sooner. 0: none ever is."""
    first_seconds: float = 300.0
    """What a call may take if it is not known how long such calls take."""


DEFAULT_HANG_LIMITS = HangLimits()


@dataclass(frozen=True)
class OverdueCall:
    """A call that takes too long, and the ranks that have not answered it."""

    ranks: tuple[int, ...]
    """Who has not answered it."""
    seconds: float
    """How long they have been at it."""
    usual_seconds: float | None
    """The longest time of calls alike, as remembered; None: it is not known."""
    processor_seconds: tuple[float | None, ...]
    """Seconds of processor time that each of `ranks` has used meanwhile, as far as heartbeats told."""

    @property
    def culprit(self) -> int | None:
        """The rank that hangs; None if unknown. If several have not answered, processor times tell which it is."""
        if len(self.ranks) == 1:
            return self.ranks[0]
        known_usage = sorted(
            (seconds, rank)
            for seconds, rank in zip(self.processor_seconds, self.ranks, strict=True)
            if seconds is not None
        )
        if len(known_usage) < len(self.ranks):
            return None
        (lowest, rank), (second_lowest, _) = known_usage[:2]
        return rank if lowest <= _IDLE * second_lowest and second_lowest >= _BUSY * self.seconds else None


@dataclass
class _CallTimes:
    """How long calls of one kind took."""

    count: int = 0
    """How many answers there were, of all ranks."""
    longest_seconds: float = 0.0
    last_answer_time: float = 0.0
    """When the last one was answered."""


@dataclass
class _PendingCalls:
    """The calls that a rank has not answered yet."""

    open: deque[tuple[int, int | None, float]] = field(default_factory=deque)
    """The number of each call, its kind, and when it was sent, the oldest first."""
    last_answer_time: float = 0.0
    """When it answered last."""
    suspected_call: int | None = None
    """The call that was overdue at the last look."""
    usage_baseline: tuple[int, float | None] | None = None
    """A call, and the processor time that the rank had used when it was first seen to be waited for."""

    def oldest_start(self) -> float:
        """Return when the rank may have begun with its oldest call."""
        return max(self.open[0][2], self.last_answer_time)


_MOVES, _SMALL = -1, -2
"""The kinds of calls that are no steps: those that may move or allocate much, and all others."""


class HangDetector:
    """Finds ranks that hang, from the times of calls and answers, all by one clock. Not safe for several threads."""

    def __init__(self, ranks: int, limits: HangLimits) -> None:
        self._limits = limits
        self._ranks = [_PendingCalls() for _ in range(ranks)]
        self._kinds: dict[int, _CallTimes] = {}
        self._newest_call: tuple[int, int | None] = 0, None
        self._step = 0
        self._blocks: GroupCounts = ()

    def note_call(self, rank: int, number: int, call: AnyCall, now: float) -> None:
        """Note that a call was sent to a rank. All ranks get the same kind of call under one `number`."""
        if number != self._newest_call[0]:
            self._newest_call = number, self._kind_of_call(call)
        self._ranks[rank].open.append((number, self._newest_call[1], now))

    def note_answer(self, rank: int, now: float) -> None:
        """Note that a rank answered its oldest call, and learn how long it took."""
        pending = self._ranks[rank]
        if not pending.open:
            return
        start_time = pending.oldest_start()
        _, kind, _ = pending.open.popleft()
        pending.last_answer_time, pending.suspected_call, pending.usage_baseline = now, None, None
        if kind is not None:
            times = self._kinds.setdefault(kind, _CallTimes())
            times.count += 1
            times.longest_seconds = max(times.longest_seconds * _FADES ** (1 / len(self._ranks)), now - start_time)
            times.last_answer_time = now

    def find_overdue(self, now: float, processor_seconds: Sequence[float | None]) -> OverdueCall | None:
        """Return the oldest call if it is overdue now and was so at the last look. `processor_seconds`: seconds of
        processor time that each rank has used so far. Call it several times a second while answers are awaited, after
        taking those that have come: if this process was stopped for long, it takes them between two looks.
        """
        waiting_ranks = [rank for rank, pending in enumerate(self._ranks) if pending.open]
        oldest_call = min((self._ranks[rank].open[0][0] for rank in waiting_ranks), default=0)
        lagging_ranks = [rank for rank in waiting_ranks if self._ranks[rank].open[0][0] == oldest_call]
        overdue = False
        for rank in lagging_ranks:
            of = self._ranks[rank]
            if of.usage_baseline is None or of.usage_baseline[0] != oldest_call:
                of.usage_baseline = oldest_call, processor_seconds[rank]
            is_late = now - of.oldest_start() > self._time_limit(of)
            overdue |= is_late and of.suspected_call == oldest_call
            of.suspected_call = oldest_call if is_late else None
        if not overdue:
            return None
        return OverdueCall(
            tuple(lagging_ranks),
            max(now - self._ranks[rank].oldest_start() for rank in lagging_ranks),
            self._longest_similar_time(self._ranks[lagging_ranks[0]]),
            tuple(self._processor_seconds_since(rank, processor_seconds[rank]) for rank in lagging_ranks),
        )

    def _processor_seconds_since(self, rank: int, processor_seconds: float | None) -> float | None:
        """Return the processor time a rank has used since its oldest call was first waited for; None if unknown."""
        baseline = self._ranks[rank].usage_baseline
        return (
            None
            if processor_seconds is None or baseline is None or baseline[1] is None
            else processor_seconds - baseline[1]
        )

    def _kind_of_call(self, call: AnyCall) -> int | None:
        """Return the kind of a call: times are compared within a kind. None if the call may take any time."""
        match call:
            case Open() | Close():
                return None
            case MakeRunner() | Begin() | Resize() | Copy():
                return _MOVES
            case Prepare(plan):
                moves = plan.copies or plan.blocks != self._blocks
                self._note_plan(plan)
                return _MOVES if moves else _SMALL
            case Dispatch(plan) | Forward(plan):
                if plan is not None:
                    self._note_plan(plan)
                return self._step
            case Choose() | Collect():
                return self._step
        return _SMALL

    def _note_plan(self, plan: StepPlan) -> None:
        """Note how much the newest plan computes (`step_work`), and its arena size."""
        self._step, self._blocks = step_work(plan).bit_length(), plan.blocks

    def _time_limit(self, rank: _PendingCalls) -> float:
        """Return how many seconds a rank's oldest call may take."""
        kind, min_seconds = rank.open[0][1], self._limits.seconds
        if kind is None or min_seconds <= 0:
            return math.inf
        usual_seconds = self._longest_similar_time(rank)
        if usual_seconds is not None:
            return max(min_seconds, HANG_FACTOR * usual_seconds)
        smaller_step_times = (times.longest_seconds for each, times in self._kinds.items() if 0 <= each < kind)
        return max(min_seconds, self._limits.first_seconds, HANG_FACTOR * max(smaller_step_times, default=0.0))

    def _longest_similar_time(self, rank: _PendingCalls) -> float | None:
        """Return the longest time of calls like a rank's oldest one, or of steps with more work; None if unknown."""
        kind, start_time = rank.open[0][1], rank.oldest_start()
        if kind is None or kind == _MOVES:
            return None
        samples = [
            (each, times.longest_seconds)
            for each, times in self._kinds.items()
            if times.count >= MIN_SAMPLES * len(self._ranks)
            and start_time - times.last_answer_time <= PAUSE_SECONDS
            and (each == kind or each > kind >= 0)
        ]
        return min(samples)[1] if samples else None


def step_work(plan: StepPlan) -> int:
    """Return how much a step computes: its tokens, each of which counts more the longer its context is."""
    return sum(each.count * (_LENGTH + each.first + each.count) for each in plan.segments) // _LENGTH
