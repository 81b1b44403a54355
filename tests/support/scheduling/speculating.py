"""An engine of numbers: a real scheduler and real speculation on a machine whose steps take the time that a test says,
with texts and guesses that a test writes.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from cortexmlx.kv.cache import KVCache
from cortexmlx.kv.pools import BlockPools
from cortexmlx.scheduling.decode_window import DrainReason
from cortexmlx.scheduling.job import Job
from cortexmlx.scheduling.plan import StepKind, StepPlan
from cortexmlx.scheduling.scheduler import Scheduler, SchedulerConfig
from cortexmlx.speculation.drafter import Drafter, SlowDrafter, TokenDraft
from cortexmlx.speculation.speculation import Speculation
from cortexmlx.types.sampling_params import SamplingParams
from support.scheduling.clockwork import LAYER
from support.scheduling.requests import add, commit


def line(points: Mapping[int, float]) -> Callable[[int], float]:
    """A function through points, that goes on as between the last two."""
    places = sorted(points)

    def at(tokens: int) -> float:
        after = min(max(bisect_left(places, tokens), 1), len(places) - 1)
        low, high = places[after - 1], places[after]
        return points[low] + (points[high] - points[low]) * (tokens - low) / (high - low)

    return at


@dataclass(frozen=True)
class Machine:
    """How many seconds decode steps take by rows, and steps that write the arena by tokens. On a CPU a step is computed
    when it is dispatched.
    """

    decode: Callable[[int], float]
    mixed: Callable[[int], float]
    at_dispatch: bool
    host: float = 0.0005
    """Seconds that the host needs for each step."""


CPU = Machine(
    line({1: 0.049, 8: 0.094, 16: 0.145}),
    line({1: 0.053, 2: 0.089, 3: 0.116, 4: 0.094, 6: 0.119, 8: 0.120, 12: 0.152, 16: 0.170, 32: 0.29}),
    at_dispatch=True,
)
"""SmolLM2 on two cores, as measured."""
GPU = Machine(
    line({1: 0.010, 8: 0.012, 16: 0.015}),
    line({1: 0.0105, 2: 0.011, 3: 0.013, 4: 0.014, 8: 0.018, 16: 0.024, 32: 0.034}),
    at_dispatch=False,
)


class Scripted:
    """A drafter whose guesses a test makes: `guess(job, budget)` returns tokens and their confidence_class, or None."""

    name = "scripted"

    def __init__(self, guess: Callable[[Job, int], tuple[Sequence[int], int] | None]) -> None:
        self._guess = guess
        self.asked = 0

    def propose(self, jobs: Sequence[Job], budget: int) -> Sequence[TokenDraft | None]:
        """See `Drafter`."""
        self.asked += len(jobs)
        guesses = [self._guess(job, budget) for job in jobs]
        return [None if guess is None else TokenDraft(*guess) for guess in guesses]

    def end(self, job: Job) -> None:
        """See `Drafter`."""

    def forget(self) -> None:
        """See `Drafter`."""


class Figures:
    """Runs answers of known texts. `times` are the seconds and tokens of all rows after each step."""

    def __init__(
        self,
        machine: Machine,
        drafters: Sequence[Drafter],
        slow: Sequence[SlowDrafter] = (),
        noise: float = 0.0,
        seed: int = 0,
        max_rows: int = 16,
        busy: int | None = None,
    ) -> None:
        """`busy` is a seed of moments of 0.5 to 5 seconds in which other programs make all steps twice as slow. `times`
        are then those that the steps would take on an idle machine.
        """
        config = SchedulerConfig(max_rows=max_rows, prefill_budget=512, context_length=1 << 20, share_prefixes=False)
        self.scheduler = Scheduler(KVCache(BlockPools([LAYER], 1 << 13, 16)), config, clock=lambda: self.now)
        self.now = 0.0
        self.speculation = Speculation(self.scheduler, drafters, slow, lambda: self.now)
        self.times: list[tuple[float, int]] = [(0.0, 0)]
        self.machine = machine
        self._noise, self._random = noise, random.Random(seed)
        self._texts: dict[int, Sequence[int]] = {}
        self._in_flight: deque[tuple[StepPlan, float]] = deque()
        self._busy, self._slowdown, self._slowdown_ends = None if busy is None else random.Random(busy), 1.0, 0.0
        self._worked = self._free_at = self._collected = 0.0
        self._tokens = 0

    def add(self, number: int, text: Sequence[int], prompt: Sequence[int] = (1, 2, 3)) -> Job:
        """Ask for an answer that is this text."""
        self._texts[number] = text
        return add(self.scheduler, number, prompt, SamplingParams(max_tokens=len(text)))

    def step(self) -> None:
        """What `EngineCore.step` does."""
        if self.machine.at_dispatch and self._in_flight and self._in_flight[-1][0].kind is StepKind.MIXED:
            self._collect()
        if self._in_flight and self.speculation.needs_drained_pipeline:
            self._collect()
        self.speculation.draft()
        self.now += self.machine.host
        plan = self.scheduler.plan(len(self._in_flight))
        if plan is not None:
            self._dispatch(plan)
        if self._in_flight and (plan is None or len(self._in_flight) > 1):
            self._collect()

    def _dispatch(self, plan: StepPlan) -> None:
        decodes = plan.kind is StepKind.DECODE
        seconds = self.machine.decode(len(plan.segments)) if decodes else self.machine.mixed(len(plan.positions))
        if self._noise:
            seconds *= 1 + self._noise * abs(self._random.gauss(0, 1))
            seconds *= 4 if self._random.random() < self._noise / 10 else 1
        self._free_at = max(self._free_at, self.now) + self.slow_down(seconds)
        if self.machine.at_dispatch:
            self.now = self._free_at
        self._in_flight.append((plan, self._free_at))

    def slow_down(self, seconds: float) -> float:
        """How long work of these seconds takes now."""
        self._worked += seconds
        while self._busy is not None and self.now >= self._slowdown_ends:
            self._slowdown = 3 - self._slowdown
            self._slowdown_ends += self._busy.uniform(0.5, 5)
        return self._slowdown * seconds

    def _collect(self) -> None:
        plan, done = self._in_flight.popleft()
        self.now = max(self.now, done)
        tokens: list[int] = []
        for segment in plan.logit_segments:
            text, job = self._texts[segment.job], self._jobs.get(segment.job)
            first = segment.logits.start + 1 - (0 if job is None else job.prompt_length)
            tokens += [text[min(first + place, len(text) - 1)] for place in range(len(segment.logits))]
        rows = commit(self.scheduler, plan, tokens, 0.001)
        for row in rows:
            self._tokens += len(row.tokens)
            if row.finish_reason is not None:
                self.speculation.end(row.job)
        seconds, self._collected = self.now - self._collected, self.now
        self.speculation.learn(plan, seconds, [row for row in rows if row.num_drafted])
        self.times.append((self.now if self._busy is None else self._worked, self._tokens))

    @property
    def _jobs(self) -> dict[int, Job]:
        return {job.id: job for job in self.scheduler.jobs}

    def until_one_ends(self) -> Figures:
        """Steps until an answer has ended: afterwards fewer rows run, whose tokens cost more."""
        rows = len(self._texts)
        while len(self._jobs) == rows:
            self.step()
        return self

    @property
    def verified(self) -> int:
        """How many steps verified drafts."""
        return self.scheduler.pipeline_gate.steps[DrainReason.VERIFY]

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.times[-1][1] / self.times[-1][0]

    def slowest(self, tokens: int, pace: float) -> float:
        """How long the slowest `tokens` tokens took, as a multiple of `pace` seconds for each. What steps bring at once
        counts whole.
        """
        worst, begin = 0.0, 0
        for (now, count), _ in pairwise(self.times):
            while self.times[begin + 1][1] <= count - tokens:
                begin += 1
            if count - self.times[begin][1] >= tokens:
                began, first = self.times[begin]
                worst = max(worst, (now - began) / (pace * (count - first)))
        return worst


def ran(machine: Machine, texts: Sequence[Sequence[int]], drafter: Drafter | None, **noise: float) -> Figures:
    """All texts at once until one has come, with or without a drafter."""
    figures = Figures(machine, [] if drafter is None else [drafter], **noise)  # type: ignore[arg-type]
    for number, text in enumerate(texts):
        figures.add(number, text)
    return figures.until_one_ends()
