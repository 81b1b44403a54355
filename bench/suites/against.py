"""The cases of `cortexmlx bench --against mlx-lm`: prefill and decode, one row and batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from cortexmlx.bench.measure.mlxlm import BatchSettings, MlxLmContestant
from cortexmlx.bench.measure.pairs import BetterDirection, ComparisonCase, Measure
from cortexmlx.bench.measure.prompts import PromptStream
from cortexmlx.bench.measure.subject import CortexContestant
from cortexmlx.bench.measure.trace import BenchRequest, Figure, RunTrace, per_second
from cortexmlx.bench.suites.rows import SpeedTest
from cortexmlx.engine import Engine

ROWS = 16
"""Rows that the engine needs for the usual cases, and for those of other suites."""

_DECODING = (1, 8, ROWS)
"""The numbers of decoding rows in the usual cases."""


@dataclass(frozen=True)
class ComparisonSizes:
    """The sizes of the comparison's cases, in tokens."""

    prompts: tuple[int, ...] = (512,)
    """The long prompts."""
    context: int = 128
    """The context at which decoding begins."""
    generates: tuple[int, ...] = (128,)
    """The generated tokens."""
    rows: tuple[SpeedTest, ...] = ()
    """If given, the cases are these rows, as without a peer, and the other sizes are ignored."""

    @property
    def batch(self) -> int:
        """The most rows that the engine needs."""
        return max([ROWS, *(test.batch for test in self.rows)])

    @property
    def longest(self) -> int:
        """The tokens of the longest request."""
        if self.rows:
            return max(test.tokens // test.batch for test in self.rows)
        return max(2 + max(self.prompts), self.context + max(self.generates))

    def tokens(self, block_size: int) -> int:
        """Return the most tokens that the engine holds at once, in blocks of `block_size`."""
        if self.rows:
            return max(test.tokens + test.batch * 2 * block_size for test in self.rows)
        decoding = ROWS * (self.context + max(self.generates) + 2 * block_size)
        return max(decoding, max(self.prompts) + block_size)


class Contest:
    """Both contestants on one engine's weights, and the prompts: the same for both sides of a pair.

    `open_engine` is called when the first case runs.
    """

    def __init__(self, open_engine: Callable[[], Engine], seed: int) -> None:
        self._open_engine = open_engine
        self._seed = seed

    @cached_property
    def engine(self) -> Engine:
        """The engine, opened at the first use."""
        return self._open_engine()

    def make_prompts(self, case: str, repetition: int) -> PromptStream:
        """Return a new stream of prompts for a repetition of a case."""
        seed = sum(case.encode()) + 1_000 * repetition + 1_000_000 * self._seed
        return PromptStream(self.engine.info.vocab_size, seed)

    def make_cortex(self, *, watch_kv: bool = False, background: bool = False) -> CortexContestant:
        """Return cortexmlx as a contestant, on the engine."""
        return CortexContestant(self.engine, watch_kv=watch_kv, background=background)

    def make_mlx_lm(self, settings: BatchSettings | None = None, *, prompt_cache: bool = True) -> MlxLmContestant:
        """Return mlx-lm as a contestant, on the engine's weights."""
        return MlxLmContestant(self.engine.inspect(lambda core: core.loaded), settings, prompt_cache=prompt_cache)

    def make_case(
        self,
        name: str,
        description: str,
        work: Callable[[PromptStream], Sequence[BenchRequest]],
        measures: Sequence[Measure],
        settings: BatchSettings | None = None,
        *,
        background: bool = False,
    ) -> ComparisonCase:
        """Return a case in which both sides run the same requests, made by `work`.

        `settings` watch the KV memory on both sides or on neither. With `background`, only the end of all requests
        counts, as in `Engine.generate_batch`.
        """
        watch_kv = settings is not None and settings.watch_kv
        return ComparisonCase(
            name,
            description,
            lambda repetition: self.make_cortex(watch_kv=watch_kv, background=background).run(
                work(self.make_prompts(name, repetition))
            ),
            lambda repetition: self.make_mlx_lm(settings).run(work(self.make_prompts(name, repetition))),
            tuple(measures),
        )


@dataclass(frozen=True)
class CaseSection:
    """Cases that share an engine."""

    cases: Callable[[Contest], list[ComparisonCase]]
    token_target: bool = True
    """Whether the engine has its default target for the time between two tokens. Without it, prompts are computed in
    full chunks even while other rows decode.
    """


def prefill_measure(target: float) -> Measure:
    """Return the measure of prompt tokens per second, until all requests have a token."""
    return Measure("prefill", "tok/s", RunTrace.prefill_rate, BetterDirection.HIGHER, target)


def decode_measure(target: float) -> Measure:
    """Return the measure of tokens per second while all rows decode."""
    return Measure("decode", "tok/s", RunTrace.decode_rate, BetterDirection.HIGHER, target)


def simultaneous_settings(rows: int) -> BatchSettings:
    """Return mlx-lm's best settings for requests that arrive together: one prefill for all of them."""
    return BatchSettings(completion_batch_size=rows, prefill_batch_size=rows)


def basic_sections(shape: ComparisonSizes) -> list[CaseSection]:
    """Return the cases of the suite "basic": one section for prefill, one for decoding."""
    return [
        CaseSection(lambda contest: prefill_cases(contest, shape)),
        CaseSection(lambda contest: decode_cases(contest, shape), token_target=False),
    ]


def prefill_cases(contest: Contest, shape: ComparisonSizes) -> list[ComparisonCase]:
    """Return the prefill cases: the tests in `shape.rows`, if any, else each long prompt, and 16 short ones at once."""
    if shape.rows:
        tests = [test for test in shape.rows if test.prompt]
        return [(_cached_prefill_case if test.depth else _prefill_case)(contest, test) for test in tests]
    long_cases = [_prefill_case(contest, SpeedTest(tokens, 0, 1, 0)) for tokens in shape.prompts if tokens]
    return [*long_cases, _prefill_case(contest, SpeedTest(20, 0, 16, 0))] if long_cases else []


def _prefill_case(contest: Contest, test: SpeedTest) -> ComparisonCase:
    is_batch = test.batch > 1
    description = f"{test.batch} prompts of {test.prompt} tokens to all first tokens"
    return contest.make_case(
        test.label,
        description if is_batch else f"one prompt of {test.prompt} tokens to its first token",
        lambda prompts: [BenchRequest(prompts.next_prompt(test.prompt), 2) for _ in range(test.batch)],
        [prefill_measure(1.0)],
        simultaneous_settings(test.batch) if is_batch else None,
    )


def _cached_prefill_case(contest: Contest, test: SpeedTest) -> ComparisonCase:
    """Return a case that computes a prompt after `test.depth` cached tokens. The turn before has a one-token answer,
    because mlx-lm's cache continues after an answer.

    mlx-lm has computed that token ahead. cortexmlx computes it now, one token more than is counted.
    """

    def make_turns(repetition: int) -> list[BenchRequest]:
        prompts = contest.make_prompts(test.label, repetition)
        return [BenchRequest(prompts.next_prompt(test.depth), 1), BenchRequest(prompts.next_prompt(test.prompt), 2)]

    def prefill_rate(trace: RunTrace) -> Figure:
        return per_second(test.prompt, trace.started, trace.prefill_end)

    return ComparisonCase(
        test.label,
        f"a prompt of {test.prompt} tokens to its first token, behind {test.depth} that are cached",
        lambda repetition: contest.make_cortex().chat(make_turns(repetition)),
        lambda repetition: contest.make_mlx_lm().chat(make_turns(repetition)),
        (Measure("prefill", "tok/s", prefill_rate, BetterDirection.HIGHER, 1.0),),
    )


def decode_cases(contest: Contest, shape: ComparisonSizes) -> list[ComparisonCase]:
    """Return the decoding cases: the tests in `shape.rows`, if any, else 1, 8 and 16 rows at one context length."""
    if shape.rows:
        rows = [test for test in shape.rows if test.generate]
        return [_decode_case(contest, t.label, t.batch, t.depth or 1, t.generate + 1) for t in rows]
    combinations = [(generate, rows) for generate in shape.generates if generate for rows in _DECODING]
    return [
        _decode_case(contest, f"tg{generate} x{rows}", rows, shape.context, generate) for generate, rows in combinations
    ]


def _decode_case(contest: Contest, name: str, rows: int, context: int, tokens: int) -> ComparisonCase:
    """Return a case in which `rows` rows decode after prompts of `context` tokens."""
    return contest.make_case(
        name,
        f"{rows} row{'s' * (rows > 1)} decode behind prompts of {context} token{'s' * (context > 1)}",
        lambda prompts: [BenchRequest(prompts.next_prompt(context), tokens) for _ in range(rows)],
        [decode_measure(0.95 if rows == 1 else 1.0)],
        simultaneous_settings(rows),
    )
