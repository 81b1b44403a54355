"""Measures what drafts save: the same scripted answers with and without speculation, in pairs that take turns to go
first.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from cortexmlx.bench.measure.trace import Timestamp
from cortexmlx.bench.replay.texts import AnswerKind, ReplayText, make_text
from cortexmlx.core.core import EngineCore
from cortexmlx.core.handle import RequestHandle
from cortexmlx.engine import Engine
from cortexmlx.errors import CortexError
from cortexmlx.execution import runner
from cortexmlx.execution.boundary import TokenMask
from cortexmlx.execution.sampling import BatchSampler, SampledTokens, TokenIndex
from cortexmlx.models.tokenizers.shared import SharedTokenizer
from cortexmlx.scheduling.job import JobId
from cortexmlx.scheduling.plan import SamplingRow
from cortexmlx.stats import DraftStats, SpeculationStats
from cortexmlx.structured.compiler import GrammarCompiler
from cortexmlx.structured.output import StructuredOutput
from cortexmlx.types.arrays import IntArray
from cortexmlx.types.request import Completion, TokenEvent
from cortexmlx.types.sampling_params import LogitsProcessor, SamplingParams

Scripts = Mapping[int, Sequence[int]]
"""The tokens of an answer, by the seed of its request. Other requests, and what comes after a script, are free."""

_FREE = -1


class ScriptedSampler:
    """A `BatchSampler` that replaces sampled tokens by a script's. Penalties would count the sampled tokens.

    A small model left alone soon repeats itself, which flatters whoever guesses its next tokens.
    """

    def __init__(
        self,
        scripts: Scripts,
        rows: Sequence[SamplingRow],
        vocab_size: int,
        processors: Mapping[JobId, Sequence[LogitsProcessor]],
    ) -> None:
        self._sampler = BatchSampler(rows, vocab_size, processors)
        self._scripts = [scripts.get(row.seed, ()) for row in rows]

    def __call__(
        self,
        logits: mx.array,
        token_index: TokenIndex,
        live_flags: Sequence[bool] | None = None,
        mask: TokenMask | None = None,
    ) -> SampledTokens:
        """Sample as `BatchSampler` in execution/sampling.py does, then replace tokens. The result is lazy."""
        sampled = self._sampler(logits, token_index, live_flags, mask)
        script_tokens = mx.array(self._script_tokens(token_index))
        return replace(sampled, tokens=mx.where(script_tokens == _FREE, sampled.tokens, script_tokens))

    def _script_tokens(self, token_index: TokenIndex) -> IntArray:
        """Return each row's next script token, or `_FREE` where its script has ended."""
        script_positions = zip(self._scripts, token_index.tolist(), strict=True)
        return np.array(
            [script[position] if position < len(script) else _FREE for script, position in script_positions], np.int32
        )


@contextmanager
def use_scripts(scripts: Scripts) -> Iterator[None]:
    """Make all engines of this process take the scripts' tokens. No request may run when the context begins or ends."""
    names = vars(runner)
    original_sampler = names["BatchSampler"]
    names["BatchSampler"] = lambda *arguments: ScriptedSampler(scripts, *arguments)
    try:
        yield
    finally:
        names["BatchSampler"] = original_sampler


RECORD = {
    "type": "object",
    "properties": {
        "identifier": {"type": "integer", "minimum": 1, "maximum": 9999},
        "customer_name": {"type": "string", "pattern": "^[A-Z][a-z]{2,20} [A-Z][a-z]{2,20}$"},
        "subscription_status": {"enum": ["active", "invited", "suspended", "deleted"]},
        "newsletter_subscribed": {"type": "boolean"},
        "shipping_address": {
            "type": "object",
            "properties": {
                "street_name": {"type": "string", "pattern": "^[A-Z][a-z]{3,20} (Street|Avenue|Road)$"},
                "postal_code": {"type": "string", "pattern": "^[0-9]{5}$"},
                "country_code": {"enum": ["DE", "FR", "GB", "US"]},
            },
            "required": ["street_name", "postal_code", "country_code"],
            "additionalProperties": False,
        },
        "lifetime_value_euros": {"type": "integer", "minimum": 0, "maximum": 100000},
    },
    "required": [
        "identifier",
        "customer_name",
        "subscription_status",
        "newsletter_subscribed",
        "shipping_address",
        "lifetime_value_euros",
    ],
    "additionalProperties": False,
}
"""A customer of a shop. Its keys are half of its text."""

RECORDS = StructuredOutput.json({"type": "array", "items": RECORD}, compact=True)
"""What the answers of `AnswerKind.SCHEMA` follow."""

_AHEAD = 200
"""The first token of so many characters is that of the whole text."""


def apply_forced_tokens(text: ReplayText, engine: Engine) -> ReplayText:
    """Return a text whose answer has the tokens that the schema forces. An engine that forces none allows them, too.
    Raises CortexError if the answer does not follow the schema.
    """
    tokenizer = SharedTokenizer(engine.inspect(lambda core: core.loaded.tokenizer))
    matcher = GrammarCompiler(tokenizer, engine.info.vocab_size).compile(RECORDS).make_matcher(forced_tokens=True)
    answer, tokens = engine.decode(text.answer), list[int]()
    written_text, is_finished = "", False
    while len(tokens) < len(text.answer) and len(written_text) < len(answer) and not is_finished:
        rest = answer[len(written_text) :][:_AHEAD]
        tokens.append(matcher.forced_tokens[0] if matcher.forced_tokens else _first_token(rest, engine))
        is_finished = matcher.accept(tokens[-1])
        written_text = engine.decode(tokens)
        if matcher.error or not answer.startswith(written_text):
            raise CortexError(f"an answer of the replay does not follow its schema at {rest[:20]!r}")
    return ReplayText(text.prompt, tuple(tokens))


def _first_token(text: str, engine: Engine) -> int:
    """Return the first token of a text."""
    prefix_ids = engine.encode("")  # what the tokenizer puts before each text
    token_ids = engine.encode(text)
    return token_ids[len(prefix_ids) if token_ids[: len(prefix_ids)] == prefix_ids else 0]


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
        """Tokens per second of all rows together."""
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
        """How many tokens a step adds to an answer, on average."""
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
    """Counts the tokens of all answers since its creation, and notes when the first answer ended."""

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
    """Return the counts of drafts that were added between two readings of the statistics."""
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
