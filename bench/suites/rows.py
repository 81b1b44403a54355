"""The speed tests of `cortexmlx bench`, with llama-bench's names. `pp512` computes a prompt of 512 tokens, `tg128`
generates 128 tokens, and `@ d4096` does so after 4,096 tokens that are not timed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import mlx.core as mx

from cortexmlx.bench.measure.prompts import PromptStream
from cortexmlx.bench.measure.subject import CortexContestant
from cortexmlx.bench.measure.trace import BenchRequest, Figure, Timestamp, per_second
from cortexmlx.core.handle import RequestHandle
from cortexmlx.core.text import StopConditions
from cortexmlx.engine import Engine
from cortexmlx.stats import EngineStats
from cortexmlx.types.request import QueuedRequest, RequestId, TokenEvent
from cortexmlx.types.sampling_params import SamplingParams

if TYPE_CHECKING:
    from cortexmlx.core.core import EngineCore

OnRun = Callable[[str], None] | None
"""Called with a line that says what is running."""


@dataclass(frozen=True)
class SpeedTest:
    """One speed test: `prompt` or `generate` tokens (the other is 0), with `batch` rows after `depth` tokens."""

    prompt: int
    generate: int
    batch: int
    depth: int

    @property
    def name(self) -> str:
        """The test's name in llama-bench's form: `pp512`, `tg128 @ d4096`."""
        base_name = f"pp{self.prompt}" if self.prompt else f"tg{self.generate}"
        return f"{base_name} @ d{self.depth}" if self.depth else base_name

    @property
    def label(self) -> str:
        """The test's name, with the number of rows if there are several: `tg128 x8`."""
        return f"{self.name} x{self.batch}" if self.batch > 1 else self.name

    @property
    def warm_up_test(self) -> SpeedTest:
        """The same test with fewer generated tokens, for a warm-up."""
        return replace(self, generate=min(self.generate, 16))

    @property
    def tokens(self) -> int:
        """How many tokens the rows have together at the end."""
        return self.batch * (self.depth + max(self.prompt + 2, self.generate + 1))


@dataclass(frozen=True)
class StepSplit:
    """Mean milliseconds of each part of an engine step: planning, building the graph, waiting, committing tokens."""

    steps: int
    """The number of measured steps."""
    plan: float
    """Scheduling."""
    build: float
    """Building and submitting the graph."""
    wait: float
    """Waiting for the device."""
    commit: float
    """Taking the tokens."""


@dataclass(frozen=True)
class TestResult:
    """The measured speed and memory of a test. Tuples have one entry for each repetition."""

    test: SpeedTest
    block_size: int
    rates: tuple[float, ...]
    """Tokens per second of wall time."""
    cpu_rates: tuple[float, ...]
    """Tokens per second of CPU time."""
    kv_bytes: int
    """The most KV memory that its sequences held, in bytes."""
    peak_bytes: int
    """MLX's peak memory, in bytes."""
    split: StepSplit
    tokens: int = 0
    """Tokens counted in all timed parts."""

    @property
    def mean(self) -> float:
        """Mean tokens per second."""
        return statistics.fmean(self.rates)

    @property
    def deviation(self) -> float:
        """Standard deviation of the tokens per second (0 if there is only one repetition)."""
        return statistics.stdev(self.rates) if len(self.rates) > 1 else 0.0

    @property
    def cpu_ms_per_token(self) -> float:
        """Milliseconds of CPU time per token, all threads together, for the median repetition."""
        return 1_000 / statistics.median(self.cpu_rates)


def make_tests(
    prompts: Sequence[int], generates: Sequence[int], batches: Sequence[int], depths: Sequence[int]
) -> list[SpeedTest]:
    """Return the tests of a command line: every combination, except that prompts after a depth have one row only."""
    tests = []
    for depth in depths:
        tests += [SpeedTest(p, 0, b, depth) for p in prompts if p for b in (batches if not depth else [1])]
        tests += [SpeedTest(0, g, b, depth) for g in generates if g for b in batches]
    return tests


class TestRuns:
    """The runs so far of all tests, on engines of several block sizes."""

    def __init__(
        self, sizes: Sequence[int], tests: Sequence[SpeedTest], prompts: PromptStream, repetitions: int
    ) -> None:
        self._prompts = prompts
        self._repetitions = repetitions
        self._runs: dict[tuple[int, SpeedTest], list[_TestRun]] = {(size, test): [] for size in sizes for test in tests}

    def run_tests(self, engines: Mapping[int, Engine], on_run: OnRun = None) -> None:
        """Run each test `repetitions` times, after a run that is not counted.

        Tests and block sizes run in one order and then in the reverse order, so that the machine's other work affects
        all of them.
        """
        subjects = {size: CortexContestant(engine, watch_kv=True) for size, engine in engines.items()}
        report_run = on_run or (lambda what: None)
        for number, (size, test) in enumerate(self._runs, 1):
            report_run(f"warming up {number} of {len(self._runs)}: {test.label}, block size {size}")
            _run_test(subjects[size], test.warm_up_test, self._prompts)
        for turn in range(self._repetitions):
            order = list(self._runs.items())
            for (size, test), runs in order if turn % 2 == 0 else reversed(order):
                report_run(f"run {turn + 1} of {self._repetitions}: {test.label}, block size {size}")
                other_bytes = sum(e.stats().kv_bytes for other_size, e in engines.items() if other_size != size)
                runs.append(_run_test(subjects[size], test, self._prompts, other_bytes))

    def results(self) -> tuple[TestResult, ...]:
        """Return the results of the tests that ran at least once."""
        return tuple(_make_result(test, size, runs) for (size, test), runs in self._runs.items() if runs)


def _make_result(test: SpeedTest, block_size: int, runs: Sequence[_TestRun]) -> TestResult:
    return TestResult(
        test=test,
        block_size=block_size,
        rates=tuple(run.rate.wall for run in runs),
        cpu_rates=tuple(run.rate.cpu for run in runs if run.rate.cpu is not None),
        kv_bytes=max(run.kv_bytes for run in runs),
        peak_bytes=max(run.peak_bytes for run in runs),
        split=_mean_step_split(runs),
        tokens=sum(run.tokens for run in runs),
    )


@dataclass(frozen=True)
class _TestRun:
    """The figures of one run of a test."""

    tokens: int
    rate: Figure
    kv_bytes: int
    peak_bytes: int
    stats_before: EngineStats
    stats_after: EngineStats


def _run_test(subject: CortexContestant, test: SpeedTest, prompts: PromptStream, other_bytes: int = 0) -> _TestRun:
    """Run a test once. MLX's peak memory is counted without the `other_bytes` bytes of engines that only wait."""
    engine = subject.engine
    mx.reset_peak_memory()
    if test.prompt and test.depth:
        return engine.inspect(lambda core: _run_cached_prefill(core, test, prompts, other_bytes))
    stats_before = engine.stats()
    length, tokens = (test.prompt, 2) if test.prompt else (test.depth or 1, test.generate + 1)
    in_flight = subject.start([BenchRequest(prompts.next_prompt(length), tokens) for _ in range(test.batch)])
    if test.generate:
        in_flight.wait_for_first_tokens()
        stats_before = engine.stats()
    trace = in_flight.finish()
    rate = trace.decode_rate() if test.generate else trace.prefill_rate()
    timed_tokens = trace.decoded_tokens if test.generate else test.prompt * test.batch
    return _TestRun(
        timed_tokens, rate, trace.kv_bytes, mx.get_peak_memory() - other_bytes, stats_before, engine.stats()
    )


def _run_cached_prefill(core: EngineCore, test: SpeedTest, prompts: PromptStream, other_bytes: int) -> _TestRun:
    """Compute `depth` tokens of a prompt, then time the rest. Call it on the engine's thread."""
    first: list[tuple[Timestamp, int]] = []

    def listen(event: TokenEvent) -> None:
        if event.token_id is not None and not first:
            first.append((Timestamp.now(), core.kv_bytes_in_use))

    backoff = core.scheduler.backoff
    budget = backoff.tokens
    handle = RequestHandle(RequestId(-1), lambda _: None, listen)
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    prompt = prompts.next_prompt(test.depth + test.prompt)
    core.add(QueuedRequest(prompt, params, submit_time=time.perf_counter()), handle, StopConditions())
    computed_tokens = 0
    try:
        while computed_tokens < test.depth:
            backoff.tokens = min(budget, test.depth - computed_tokens)
            core.step()
            computed_tokens = core.scheduler.jobs[0].num_computed_tokens
    finally:
        backoff.tokens = budget
    core.drain()
    stats_before, begin = core.stats(), Timestamp.now()
    while not core.idle:
        core.step()
    end, kv_bytes = first[0]
    rate, peak = per_second(test.prompt, begin, end), mx.get_peak_memory() - other_bytes
    return _TestRun(test.prompt, rate, kv_bytes, peak, stats_before, core.stats())


def _mean_step_split(runs: Sequence[_TestRun]) -> StepSplit:
    """Return the mean milliseconds of a step, by part, over all runs."""
    steps = sum(run.stats_after.steps - run.stats_before.steps for run in runs)

    def mean_milliseconds(part: str) -> float:
        seconds: float = sum(getattr(r.stats_after, part) - getattr(r.stats_before, part) for r in runs)
        return 1_000 * seconds / max(1, steps)

    return StepSplit(steps, *(mean_milliseconds(f"{part}_seconds") for part in ("plan", "build", "wait", "commit")))
