"""Measures what drafts save: the same scripted answers with and without speculation, in pairs that take turns to go
first.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from cortexmlx.bench.measure.trace import Timestamp
from cortexmlx.bench.replay.schema import RECORDS, apply_forced_tokens
from cortexmlx.bench.replay.scripted import use_scripts
from cortexmlx.bench.replay.texts import AnswerKind, ReplayText, make_text
from cortexmlx.core.core import EngineCore
from cortexmlx.core.handle import RequestHandle
from cortexmlx.engine import Engine
from cortexmlx.errors import CortexError
from cortexmlx.stats import DraftStats, SpeculationStats
from cortexmlx.types.request import Completion, TokenEvent
from cortexmlx.types.sampling_params import SamplingParams


@dataclass(frozen=True)
class TimedSpan:
    """The tokens and the time of a part of a run."""

    tokens: int
    """Tokens of all rows."""
    wall: float
    cpu: float
    """Seconds of all threads of the process, which other programs disturb less."""

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all rows per second."""
        return self.tokens / self.wall


@dataclass(frozen=True)
class ReplayRun:
    """The result of one run: all answers of a workload, computed at once after their prompts."""

    tokens: tuple[tuple[int, ...], ...]
    whole_span: TimedSpan
    concurrent_span: TimedSpan
    """Until the first answer ended. Drafts help some rows more than others, and afterwards fewer rows share a step. In
    a run of more requests than rows the next request takes the place.
    """
    drafts: SpeculationStats

    @property
    def token_count(self) -> int:
        """The number of tokens of all answers."""
        return sum(map(len, self.tokens))

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens that a step adds to an answer."""
        return self.token_count / max(1, self.token_count - self.drafts.accepted)


@dataclass(frozen=True)
class Workload:
    """The texts to replay for one kind of text: one set of rows for each pair of runs."""

    kind: AnswerKind
    texts: tuple[tuple[ReplayText, ...], ...]
    """`[pairs][rows]`"""

    def mean_repetition(self, order: int) -> float:
        """Return the mean share of n-grams of `order` tokens that occurred earlier in their text."""
        return statistics.fmean(row.repetition(order) for rows in self.texts for row in rows)

    @property
    def rows(self) -> int:
        """The number of answers that are computed at once."""
        return len(self.texts[0])


@dataclass(frozen=True)
class WorkloadResult:
    """The runs of a workload with drafts and without, in pairs."""

    workload: Workload
    plain_runs: tuple[ReplayRun, ...]
    speculating_runs: tuple[ReplayRun, ...]

    @property
    def ratios(self) -> tuple[float, ...]:
        """Tokens per second with drafts over those without, while all answers run, pair by pair."""
        return tuple(a.concurrent_span.tokens_per_second / b.concurrent_span.tokens_per_second for a, b in self._pairs)

    @property
    def ratio(self) -> float:
        """The median of the pairs' ratios."""
        return statistics.median(self.ratios)

    @property
    def cpu_ratio(self) -> float:
        """The median of the pairs' ratios by CPU time."""
        spans = ((a.concurrent_span, b.concurrent_span) for a, b in self._pairs)
        return statistics.median(b.cpu / b.tokens * a.tokens / a.cpu for a, b in spans)

    @property
    def whole_ratio(self) -> float:
        """The median of the pairs' ratios over whole runs, until the last answer ended."""
        return statistics.median(
            a.whole_span.tokens_per_second / b.whole_span.tokens_per_second for a, b in self._pairs
        )

    @property
    def _pairs(self) -> list[tuple[ReplayRun, ReplayRun]]:
        """The pairs of a run with drafts and one without."""
        return list(zip(self.speculating_runs, self.plain_runs, strict=True))


def make_workload(kind: AnswerKind, pairs: int, rows: int, tokens: int, engine: Engine) -> Workload:
    """Return the texts of one kind for pairs of runs, with answers of at most `tokens` tokens."""
    texts = [make_text(kind, row, tokens, engine.encode) for row in range(pairs * rows)]
    if kind is AnswerKind.SCHEMA:
        texts = [apply_forced_tokens(row, engine) for row in texts]
    return Workload(kind, tuple(tuple(texts[first : first + rows]) for first in range(0, len(texts), rows)))


def measure_workloads(
    plain_engine: Engine, speculating_engine: Engine, workloads: Sequence[Workload], on_run: Callable[[str], None]
) -> Iterator[WorkloadResult]:
    """Run each workload with drafts and without, and yield its result. Both engines have a row for each text of a run.

    Each pair has a client of its own: neither engine finds prompts or answers of an earlier one. A first pair is not
    counted. Raises CortexError if an answer is not its script.
    """
    for work in workloads:
        engine_runs: tuple[tuple[Engine, list[ReplayRun]], ...] = ((plain_engine, []), (speculating_engine, []))
        for pair in range(-1, len(work.texts)):
            rows = work.texts[max(pair, 0)]
            for engine, runs in engine_runs if pair % 2 else engine_runs[::-1]:
                name = "with drafts" if engine is speculating_engine else "without"
                on_run(f"{work.kind.value}, {work.rows} rows, pair {pair + 1} of {len(work.texts)}: {name}")
                run = _run_workload(engine, rows, f"{work.kind.value} {pair}", work)
                if run.tokens != tuple(row.answer for row in rows):
                    raise CortexError(f"an answer of {work.kind.value} {name} is not its script")
                if pair >= 0:
                    runs.append(run)
        yield WorkloadResult(work, tuple(engine_runs[0][1]), tuple(engine_runs[1][1]))


class _AnswerClock:
    """Counts the tokens of all answers from its creation on, and notes when the first answer ended."""

    def __init__(self) -> None:
        self._start_time = Timestamp.now()
        self._tokens = 0
        self.concurrent_span: TimedSpan | None = None

    def listen(self, event: TokenEvent) -> None:
        """Count an event of any answer."""
        self._tokens += event.token_id is not None
        if event.completion is not None and self.concurrent_span is None:
            self.concurrent_span = self.span

    @property
    def span(self) -> TimedSpan:
        """The tokens and the time so far."""
        now = Timestamp.now()
        return TimedSpan(self._tokens, now.wall - self._start_time.wall, now.cpu - self._start_time.cpu)


def _run_workload(engine: Engine, rows: Sequence[ReplayText], client: str, work: Workload) -> ReplayRun:
    """Compute the answers of all rows. Prompts are computed before, so that they are found in the prefix cache."""
    with use_scripts({seed: row.answer for seed, row in enumerate(rows)}):
        _compute_answers(engine, rows, client, SamplingParams(max_tokens=1))
        stats_before, clock = engine.stats().speculation, _AnswerClock()
        params = SamplingParams(
            max_tokens=None,
            temperature=0.0,
            ignore_eos=True,
            structured=RECORDS if work.kind is AnswerKind.SCHEMA else None,
        )
        completions = _compute_answers(engine, rows, client, params, clock.listen)
        whole_span, stats_after = clock.span, engine.stats().speculation
    assert clock.concurrent_span is not None
    return ReplayRun(
        tuple(each.token_ids for each in completions),
        whole_span,
        clock.concurrent_span,
        _stats_between(stats_before, stats_after),
    )


def _compute_answers(
    engine: Engine,
    rows: Sequence[ReplayText],
    client: str,
    params: SamplingParams,
    listener: Callable[[TokenEvent], None] | None = None,
) -> list[Completion]:
    """Submit all requests between two steps; return answers as long as the scripts, unless `params` set a length."""

    def submit(core: EngineCore) -> list[RequestHandle]:
        return [
            engine.submit(
                row.prompt,
                replace(params, seed=seed, max_tokens=params.max_tokens or len(row.answer)),
                client=client,
                listener=listener,
            )
            for seed, row in enumerate(rows)
        ]

    return [handle.result() for handle in engine.inspect(submit)]


def _stats_between(stats_before: SpeculationStats, stats_after: SpeculationStats) -> SpeculationStats:
    """Return the drafted and accepted tokens between two readings of the statistics."""
    sources: Mapping[str, DraftStats] = {
        name: DraftStats(source_after.drafted - source_before.drafted, source_after.accepted - source_before.accepted)
        for name, source_after in stats_after.sources.items()
        for source_before in (stats_before.sources.get(name, DraftStats(0, 0)),)
    }
    return SpeculationStats(
        stats_after.drafted - stats_before.drafted,
        stats_after.accepted - stats_before.accepted,
        stats_after.verified - stats_before.verified,
        sources,
    )
