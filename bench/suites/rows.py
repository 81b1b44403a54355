"""The rows of `cortexmlx bench`, named as llama-bench names them: `pp512` computes a prompt of 512 tokens, `tg128`
generates 128 tokens, `@ d4096` does so behind 4,096 tokens that are not timed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx

from cortexmlx.bench.measure.prompts import Prompts
from cortexmlx.bench.measure.subject import Cortex
from cortexmlx.bench.measure.trace import Figure, Stamp, Work, per_second
from cortexmlx.engine import Engine
from cortexmlx.request import QueuedRequest, RequestId, SamplingParams, TokenEvent
from cortexmlx.serving.handle import RequestHandle
from cortexmlx.stats import EngineStats

if TYPE_CHECKING:
    from cortexmlx.serving.core import EngineCore


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
class Row:
    """A test's outcome: tokens per second of every repetition, by wall time and by CPU time; KV memory that its
    sequences held at most, and MLX's peak memory, in bytes."""

    test: Test
    block_size: int
    rates: tuple[float, ...]
    cpu_rates: tuple[float, ...]
    kv_bytes: int
    peak_bytes: int
    split: StepSplit

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


def measure(
    engine: Engine,
    wanted: Sequence[Test],
    repetitions: int,
    prompts: Prompts,
    on_run: Callable[[str], None] | None = None,
) -> Iterator[Row]:
    """Run each test `repetitions` times, after a small run that is not counted."""
    subject = Cortex(engine, watch_kv=True)
    subject.run([Work(prompts.take(32), 8)])
    for test in wanted:
        runs = []
        for repetition in range(repetitions):
            if on_run is not None:
                on_run(f"{test.name}, batch {test.batch}, run {repetition + 1} of {repetitions}")
            runs.append(_run(subject, test, prompts))
        yield Row(
            test=test,
            block_size=engine.stats().block_size,
            rates=tuple(run.rate.wall for run in runs),
            cpu_rates=tuple(run.rate.cpu for run in runs if run.rate.cpu is not None),
            kv_bytes=max(run.kv_bytes for run in runs),
            peak_bytes=max(run.peak_bytes for run in runs),
            split=_split(runs),
        )


@dataclass(frozen=True)
class _Run:
    rate: Figure
    kv_bytes: int
    peak_bytes: int
    before: EngineStats
    after: EngineStats


def _run(subject: Cortex, test: Test, prompts: Prompts) -> _Run:
    engine = subject.engine
    mx.reset_peak_memory()
    if test.prompt and test.depth:
        return engine.inspect(lambda core: _prefill_behind(core, test, prompts))
    before = engine.stats()
    length, tokens = (test.prompt, 2) if test.prompt else (test.depth or 1, test.generate + 1)
    flight = subject.start([Work(prompts.take(length), tokens) for _ in range(test.batch)])
    if test.generate:
        flight.wait_for_first_tokens()
        before = engine.stats()
    trace = flight.finish()
    rate = trace.decode_rate() if test.generate else trace.prefill_rate()
    return _Run(rate, trace.kv_bytes, mx.get_peak_memory(), before, engine.stats())


def _prefill_behind(core: EngineCore, test: Test, prompts: Prompts) -> _Run:
    """Compute `depth` tokens of a prompt, then the rest by the clock. On the engine's thread."""
    first: list[tuple[Stamp, int]] = []

    def listen(event: TokenEvent) -> None:
        if event.token_id is not None and not first:
            first.append((Stamp.now(), core.kv_bytes_in_use))

    restraint = core.scheduler.restraint
    budget = restraint.tokens
    handle = RequestHandle(RequestId(-1), lambda _: None, listen)
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    prompt = prompts.take(test.depth + test.prompt)
    core.add(QueuedRequest(prompt, params, submitted=time.perf_counter()), handle)
    computed = 0
    try:
        while computed < test.depth:
            restraint.tokens = min(budget, test.depth - computed)
            core.step()
            computed = core.scheduler.jobs[0].num_computed_tokens
    finally:
        restraint.tokens = budget
    core.drain()
    before, begun = core.stats(), Stamp.now()
    while not core.idle:
        core.step()
    end, kv_bytes = first[0]
    return _Run(per_second(test.prompt, begun, end), kv_bytes, mx.get_peak_memory(), before, core.stats())


def _split(runs: Sequence[_Run]) -> StepSplit:
    steps = sum(run.after.steps - run.before.steps for run in runs)

    def mean(part: str) -> float:
        seconds: float = sum(getattr(r.after, part) - getattr(r.before, part) for r in runs)
        return 1_000 * seconds / max(1, steps)

    return StepSplit(steps, *(mean(f"{part}_seconds") for part in ("plan", "build", "wait", "commit")))
