"""The rows of `cortexmlx bench`, named as llama-bench names them: `pp512` computes a prompt of 512 tokens, `tg128`
generates 128 tokens, `@ d4096` does so behind 4,096 tokens that are not timed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import mlx.core as mx

from cortexmlx.bench.measure.prompts import Prompts
from cortexmlx.bench.measure.subject import Cortex
from cortexmlx.bench.measure.trace import Figure, Stamp, Work, per_second
from cortexmlx.bench.measure.yardstick import Yardstick
from cortexmlx.engine import Engine
from cortexmlx.request import QueuedRequest, RequestId, TokenEvent
from cortexmlx.sampling_params import SamplingParams
from cortexmlx.serving.handle import RequestHandle
from cortexmlx.serving.text.stops import Stops
from cortexmlx.stats import EngineStats

if TYPE_CHECKING:
    from cortexmlx.serving.core import EngineCore

OnRun = Callable[[str], None] | None
"""Whom to tell what is running."""


@dataclass(frozen=True)
class Test:
    """What one row measures: `prompt` or `generate` tokens (the other is 0) with `batch` rows behind `depth` tokens."""

    prompt: int
    generate: int
    batch: int
    depth: int

    @property
    def name(self) -> str:
        """`pp512`, `tg128 @ d4096`."""
        what = f"pp{self.prompt}" if self.prompt else f"tg{self.generate}"
        return f"{what} @ d{self.depth}" if self.depth else what

    @property
    def label(self) -> str:
        """The name, and the rows if they are several: `tg128 x8`."""
        return f"{self.name} x{self.batch}" if self.batch > 1 else self.name

    @property
    def shorter(self) -> Test:
        """The same with few generated tokens, to warm up."""
        return replace(self, generate=min(self.generate, 16))

    @property
    def tokens(self) -> int:
        """Tokens that all its rows hold at the end."""
        return self.batch * (self.depth + max(self.prompt + 2, self.generate + 1))


@dataclass(frozen=True)
class StepSplit:
    """Mean milliseconds of a step: scheduling, building and handing over the graph, waiting for the device, taking the
    tokens. `steps` were measured."""

    steps: int
    plan: float
    build: float
    wait: float
    commit: float


@dataclass(frozen=True)
class TestResult:
    """A test's outcome: tokens per second of every repetition, by wall time and by CPU time; KV memory that its
    sequences held at most, and MLX's peak memory, in bytes; `tokens` were counted in all timed stretches.

    Of every repetition also the round it was measured in, and what of the yardstick stood `beside` it, by part and
    clock.
    """

    test: Test
    block_size: int
    rates: tuple[float, ...]
    cpu_rates: tuple[float, ...]
    kv_bytes: int
    peak_bytes: int
    split: StepSplit
    tokens: int = 0
    rounds: tuple[int, ...] = ()
    beside: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def mean(self) -> float:
        """Mean tokens per second."""
        return statistics.fmean(self.rates)

    @property
    def deviation(self) -> float:
        """Standard deviation of a repetition (0 for one)."""
        return statistics.stdev(self.rates) if len(self.rates) > 1 else 0.0

    @property
    def cpu_ms_per_token(self) -> float:
        """Milliseconds of CPU time per token, all threads together: the median repetition."""
        return 1_000 / statistics.median(self.cpu_rates)


def tests(
    prompts: Sequence[int], generates: Sequence[int], batches: Sequence[int], depths: Sequence[int]
) -> list[Test]:
    """The tests of a command line: every combination, but prompts behind a depth for one row only."""
    found = []
    for depth in depths:
        found += [Test(p, 0, b, depth) for p in prompts if p for b in (batches if not depth else [1])]
        found += [Test(0, g, b, depth) for g in generates if g for b in batches]
    return found


class Runs:
    """The runs of all tests on engines of several block sizes, as far as they have come."""

    def __init__(self, sizes: Sequence[int], wanted: Sequence[Test], prompts: Prompts, repetitions: int) -> None:
        self._prompts = prompts
        self._yardstick = Yardstick()
        self._repetitions = repetitions
        self._runs: dict[tuple[int, Test], list[_Run]] = {(size, test): [] for size in sizes for test in wanted}

    def measure(self, engines: Mapping[int, Engine], turns: Iterable[int], round_: int, on_run: OnRun = None) -> None:
        """Run each test once in each of these `turns`, after a run that is not counted. Tests and block sizes take
        turns, in one order and then in the other, so that what else the machine does in these minutes meets all of
        them, and the yardstick is measured between any two.
        """
        subjects = {size: Cortex(engine, watch_kv=True) for size, engine in engines.items()}
        told = on_run or (lambda what: None)
        for number, (size, test) in enumerate(self._runs, 1):
            told(f"warming up {number} of {len(self._runs)}: {test.label}, block size {size}")
            _run(subjects[size], test.shorter, self._prompts)
        for turn in turns:
            order = list(self._runs.items())
            for (size, test), runs in order if turn % 2 == 0 else reversed(order):
                told(f"run {turn + 1} of {self._repetitions}: {test.label}, block size {size}")
                self._yardstick.sample()
                before = self._yardstick.samples - 1
                others = sum(e.stats().kv_bytes for other, e in engines.items() if other != size)
                run = _run(subjects[size], test, self._prompts, others + self._yardstick.bytes)
                runs.append(replace(run, round=round_, sample=before))
        self._yardstick.sample()

    def rows(self) -> tuple[TestResult, ...]:
        """The tests that ran at least once."""
        return tuple(_row(test, size, runs, self._yardstick) for (size, test), runs in self._runs.items() if runs)

    def yardstick(self) -> dict[str, tuple[float, ...]]:
        """Its samples so far."""
        return self._yardstick.seconds()


def _row(test: Test, block_size: int, runs: Sequence[_Run], yardstick: Yardstick) -> TestResult:
    around = [yardstick.beside(run.sample) for run in runs]
    return TestResult(
        test=test,
        block_size=block_size,
        rates=tuple(run.rate.wall for run in runs),
        cpu_rates=tuple(run.rate.cpu for run in runs if run.rate.cpu is not None),
        kv_bytes=max(run.kv_bytes for run in runs),
        peak_bytes=max(run.peak_bytes for run in runs),
        split=_split(runs),
        tokens=sum(run.tokens for run in runs),
        rounds=tuple(run.round for run in runs),
        beside={name: tuple(each[name] for each in around) for name in around[0]},
    )


@dataclass(frozen=True)
class _Run:
    tokens: int
    rate: Figure
    kv_bytes: int
    peak_bytes: int
    before: EngineStats
    after: EngineStats
    round: int = 0
    sample: int = 0


def _run(subject: Cortex, test: Test, prompts: Prompts, others: int = 0) -> _Run:
    """One run; MLX's peak memory is counted without the `others` bytes of who only waits."""
    engine = subject.engine
    mx.reset_peak_memory()
    if test.prompt and test.depth:
        return engine.inspect(lambda core: _prefill_behind(core, test, prompts, others))
    before = engine.stats()
    length, tokens = (test.prompt, 2) if test.prompt else (test.depth or 1, test.generate + 1)
    flight = subject.start([Work(prompts.take(length), tokens) for _ in range(test.batch)])
    if test.generate:
        flight.wait_for_first_tokens()
        before = engine.stats()
    trace = flight.finish()
    rate = trace.decode_rate() if test.generate else trace.prefill_rate()
    timed = trace.decoded if test.generate else test.prompt * test.batch
    return _Run(timed, rate, trace.kv_bytes, mx.get_peak_memory() - others, before, engine.stats())


def _prefill_behind(core: EngineCore, test: Test, prompts: Prompts, others: int) -> _Run:
    """Compute `depth` tokens of a prompt, then the rest by the clock. On the engine's thread."""
    first: list[tuple[Stamp, int]] = []

    def listen(event: TokenEvent) -> None:
        if event.token_id is not None and not first:
            first.append((Stamp.now(), core.kv_bytes_in_use))

    backoff = core.scheduler.backoff
    budget = backoff.tokens
    handle = RequestHandle(RequestId(-1), lambda _: None, listen)
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    prompt = prompts.take(test.depth + test.prompt)
    core.add(QueuedRequest(prompt, params, submitted=time.perf_counter()), handle, Stops())
    computed = 0
    try:
        while computed < test.depth:
            backoff.tokens = min(budget, test.depth - computed)
            core.step()
            computed = core.scheduler.jobs[0].num_computed_tokens
    finally:
        backoff.tokens = budget
    core.drain()
    before, begun = core.stats(), Stamp.now()
    while not core.idle:
        core.step()
    end, kv_bytes = first[0]
    rate, peak = per_second(test.prompt, begun, end), mx.get_peak_memory() - others
    return _Run(test.prompt, rate, kv_bytes, peak, before, core.stats())


def _split(runs: Sequence[_Run]) -> StepSplit:
    steps = sum(run.after.steps - run.before.steps for run in runs)

    def mean(part: str) -> float:
        seconds: float = sum(getattr(r.after, part) - getattr(r.before, part) for r in runs)
        return 1_000 * seconds / max(1, steps)

    return StepSplit(steps, *(mean(f"{part}_seconds") for part in ("plan", "build", "wait", "commit")))
