"""What drafts save: the same scripted answers with and without speculation, in pairs that take turns to go first."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from cortexmlx.bench.measure.trace import Stamp
from cortexmlx.bench.replay.schema import RECORDS, as_forced
from cortexmlx.bench.replay.scripted import scripted
from cortexmlx.bench.replay.texts import Kind, Replayed, replayed
from cortexmlx.core.core import EngineCore
from cortexmlx.core.handle import RequestHandle
from cortexmlx.engine import Engine
from cortexmlx.errors import CortexError
from cortexmlx.stats import DraftStats, SpeculationStats
from cortexmlx.types.request import Completion, TokenEvent
from cortexmlx.types.sampling_params import SamplingParams

LIVE_TEMPERATURE = 0.8
"""The temperature at which the model's own choices are taken. Those of a small model at 0 repeat themselves."""


@dataclass(frozen=True)
class Span:
    """A part of a run."""

    tokens: int
    """Tokens of all rows."""
    wall: float
    cpu: float
    """Seconds of all threads of the process, which other programs disturb less."""

    @property
    def rate(self) -> float:
        """Tokens of all rows per second."""
        return self.tokens / self.wall


@dataclass(frozen=True)
class Run:
    """All answers of a workload, computed at once after their prompts."""

    tokens: tuple[tuple[int, ...], ...]
    whole: Span
    together: Span
    """Until the first answer ended. Drafts help some rows more than others, and afterwards fewer rows share a step. In
    a run of more requests than rows the next request takes the place.
    """
    drafts: SpeculationStats

    @property
    def count(self) -> int:
        """How many tokens all answers have."""
        return sum(map(len, self.tokens))

    @property
    def tokens_per_step(self) -> float:
        """Tokens of an answer over the steps that computed them."""
        return self.count / max(1, self.count - self.drafts.accepted)


@dataclass(frozen=True)
class Workload:
    """Texts of one kind for each pair of runs."""

    kind: Kind
    texts: tuple[tuple[Replayed, ...], ...]
    """`[pairs][rows]`"""
    live: bool
    """Whether the model's own choices are taken, and not the scripts'."""

    def repetition(self, order: int) -> float:
        """Return the mean share of n-grams of `order` tokens that are repeated."""
        return statistics.fmean(row.repetition(order) for rows in self.texts for row in rows)

    @property
    def rows(self) -> int:
        """How many answers are computed at once."""
        return len(self.texts[0])


@dataclass(frozen=True)
class Measured:
    """The pairs of a workload."""

    workload: Workload
    plain: tuple[Run, ...]
    speculating: tuple[Run, ...]

    @property
    def ratios(self) -> tuple[float, ...]:
        """Tokens per second with drafts over those without, while all answers run, pair by pair."""
        return tuple(a.together.rate / b.together.rate for a, b in self._pairs)

    @property
    def ratio(self) -> float:
        """The median of the pairs' ratios."""
        return statistics.median(self.ratios)

    @property
    def cpu_ratio(self) -> float:
        """The same by CPU time."""
        spans = ((a.together, b.together) for a, b in self._pairs)
        return statistics.median(b.cpu / b.tokens * a.tokens / a.cpu for a, b in spans)

    @property
    def whole_ratio(self) -> float:
        """The same until the last answer ended."""
        return statistics.median(a.whole.rate / b.whole.rate for a, b in self._pairs)

    @property
    def _pairs(self) -> list[tuple[Run, Run]]:
        """Runs with drafts, and without."""
        return list(zip(self.speculating, self.plain, strict=True))

    @property
    def same(self) -> int:
        """Answers that have the same tokens with drafts and without, of all pairs."""
        return sum(a == b for mine, other in self._pairs for a, b in zip(mine.tokens, other.tokens, strict=True))


def workload(kind: Kind, pairs: int, rows: int, tokens: int, engine: Engine, live: bool = False) -> Workload:
    """Return texts for pairs of runs, with answers of `tokens` tokens at most."""
    every = [replayed(kind, row, tokens, engine.encode) for row in range(pairs * rows)]
    if kind is Kind.SCHEMA:
        every = [as_forced(row, engine) for row in every]
    return Workload(kind, tuple(tuple(every[first : first + rows]) for first in range(0, len(every), rows)), live)


def measure(
    plain: Engine, speculating: Engine, workloads: Sequence[Workload], tell: Callable[[str], None]
) -> Iterator[Measured]:
    """Yield the pairs of each workload. Both engines have a row for each text of a run.

    Each pair has a client of its own: neither engine finds prompts or answers of an earlier one. A first pair is not
    counted. Raises CortexError if an answer is not its script.
    """
    for work in workloads:
        sides: tuple[tuple[Engine, list[Run]], ...] = ((plain, []), (speculating, []))
        for pair in range(-1, len(work.texts)):
            rows = work.texts[max(pair, 0)]
            for engine, runs in sides if pair % 2 else sides[::-1]:
                name = "with drafts" if engine is speculating else "without"
                tell(f"{work.kind.value}, {work.rows} rows, pair {pair + 1} of {len(work.texts)}: {name}")
                run = _run(engine, rows, f"{work.kind.value} {pair}", work)
                if not work.live and run.tokens != tuple(row.answer for row in rows):
                    raise CortexError(f"an answer of {work.kind.value} {name} is not its script")
                if pair >= 0:
                    runs.append(run)
        yield Measured(work, tuple(sides[0][1]), tuple(sides[1][1]))


class _Clock:
    """Counts the tokens of answers from its beginning on, and notes when the first of them ended."""

    def __init__(self) -> None:
        self._began = Stamp.now()
        self._tokens = 0
        self.together: Span | None = None

    def listen(self, event: TokenEvent) -> None:
        """Count an event of any answer."""
        self._tokens += event.token_id is not None
        if event.completion is not None and self.together is None:
            self.together = self.span

    @property
    def span(self) -> Span:
        """What has come so far."""
        now = Stamp.now()
        return Span(self._tokens, now.wall - self._began.wall, now.cpu - self._began.cpu)


def _run(engine: Engine, rows: Sequence[Replayed], client: str, work: Workload) -> Run:
    """Compute the answers of all rows. Prompts are computed before, so that they are found in the prefix cache."""
    scripts = {} if work.live else {seed: row.answer for seed, row in enumerate(rows)}
    with scripted(scripts):
        _answers(engine, rows, client, SamplingParams(max_tokens=1))
        before, clock = engine.stats().speculation, _Clock()
        params = SamplingParams(
            max_tokens=None,
            temperature=LIVE_TEMPERATURE if work.live else 0.0,
            ignore_eos=True,
            structured=RECORDS if work.kind is Kind.SCHEMA else None,
        )
        done = _answers(engine, rows, client, params, clock.listen)
        whole, after = clock.span, engine.stats().speculation
    assert clock.together is not None
    return Run(tuple(each.token_ids for each in done), whole, clock.together, _since(before, after))


def _answers(
    engine: Engine,
    rows: Sequence[Replayed],
    client: str,
    params: SamplingParams,
    listener: Callable[[TokenEvent], None] | None = None,
) -> list[Completion]:
    """Submit all requests between two steps, and wait for the answers, of as many tokens as the scripts if `params` do
    not say it.
    """

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


def _since(before: SpeculationStats, after: SpeculationStats) -> SpeculationStats:
    """Return what was drafted from one moment to another."""
    sources: Mapping[str, DraftStats] = {
        name: DraftStats(of.drafted - was.drafted, of.accepted - was.accepted)
        for name, of in after.sources.items()
        for was in (before.sources.get(name, DraftStats(0, 0)),)
    }
    return SpeculationStats(
        after.drafted - before.drafted, after.accepted - before.accepted, after.verified - before.verified, sources
    )
