"""The cases of `cortexmlx bench --against mlx-lm`: prefill and decode, alone and in batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from cortexmlx.bench.measure.mlxlm import BatchSettings, MlxLm
from cortexmlx.bench.measure.pairs import Better, Case, Measure
from cortexmlx.bench.measure.prompts import Prompts
from cortexmlx.bench.measure.subject import Cortex
from cortexmlx.bench.measure.trace import Figure, Trace, Work, per_second
from cortexmlx.bench.suites.rows import Test
from cortexmlx.engine import Engine

ROWS = 16
"""Rows that the engine needs for the usual cases, and for those of other suites."""

_DECODING = (1, 8, ROWS)
"""The numbers of decoding rows in the usual cases."""


@dataclass(frozen=True)
class Shape:
    """Sizes of the cases, in tokens."""

    prompts: tuple[int, ...] = (512,)
    """The long prompts."""
    context: int = 128
    """The context at which decoding begins."""
    generates: tuple[int, ...] = (128,)
    """The generated tokens."""
    rows: tuple[Test, ...] = ()
    """If given, the cases are these rows, as without a peer, and the other sizes are ignored."""

    @property
    def batch(self) -> int:
        """Rows that the engine needs."""
        return max([ROWS, *(test.batch for test in self.rows)])

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
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
    """Both sides on one engine's weights, and the source of prompts: the same prompts for both sides of a pair.

    `open_engine` is called when the first case runs.
    """

    def __init__(self, open_engine: Callable[[], Engine], seed: int) -> None:
        self._open_engine = open_engine
        self._seed = seed

    @cached_property
    def engine(self) -> Engine:
        """The engine, opened at the first use."""
        return self._open_engine()

    def prompts(self, case: str, repetition: int) -> Prompts:
        """Return a new stream of prompts for a repetition of a case."""
        seed = sum(case.encode()) + 1_000 * repetition + 1_000_000 * self._seed
        return Prompts(self.engine.info.vocab_size, seed)

    def cortex(self, *, watch_kv: bool = False, background: bool = False) -> Cortex:
        """Return cortexmlx as a contestant: see `Cortex`."""
        return Cortex(self.engine, watch_kv=watch_kv, background=background)

    def mlx_lm(self, settings: BatchSettings | None = None, *, prompt_cache: bool = True) -> MlxLm:
        """Return mlx-lm on the engine's weights."""
        return MlxLm(self.engine.inspect(lambda core: core.loaded), settings, prompt_cache=prompt_cache)

    def case(
        self,
        name: str,
        what: str,
        work: Callable[[Prompts], Sequence[Work]],
        measures: Sequence[Measure],
        settings: BatchSettings | None = None,
        *,
        background: bool = False,
    ) -> Case:
        """Return a case in which both sides run the same work.

        `settings` watch the KV memory on both sides or on neither. With `background`, only the end of all requests
        counts, as in `Engine.generate_batch`.
        """
        watch_kv = settings is not None and settings.watch_kv
        return Case(
            name,
            what,
            lambda repetition: self.cortex(watch_kv=watch_kv, background=background).run(
                work(self.prompts(name, repetition))
            ),
            lambda repetition: self.mlx_lm(settings).run(work(self.prompts(name, repetition))),
            tuple(measures),
        )


@dataclass(frozen=True)
class Section:
    """Cases that share an engine."""

    cases: Callable[[Contest], list[Case]]
    token_target: bool = True
    """Whether the engine has its default target for the time between two tokens. Without it, prompts are computed in
    full chunks even while other rows decode.
    """


def prefill(target: float) -> Measure:
    """Return the measure of prompt tokens per second, until all requests have a token."""
    return Measure("prefill", "tok/s", Trace.prefill_rate, Better.HIGHER, target)


def decode(target: float) -> Measure:
    """Return the measure of tokens per second while all rows decode."""
    return Measure("decode", "tok/s", Trace.decode_rate, Better.HIGHER, target)


def together(rows: int) -> BatchSettings:
    """Return mlx-lm's best settings for requests that arrive together: one prefill for all of them."""
    return BatchSettings(completion_batch_size=rows, prefill_batch_size=rows)


def basic_sections(shape: Shape) -> list[Section]:
    """Return prefill of one long prompt and of many short ones, and decode with 1, 8 and 16 rows."""
    return [
        Section(lambda contest: prefill_cases(contest, shape)),
        Section(lambda contest: decode_cases(contest, shape), token_target=False),
    ]


def prefill_cases(contest: Contest, shape: Shape) -> list[Case]:
    """Return a case for each long prompt, and one for sixteen short prompts. If the shape has rows, return those with a
    prompt.
    """
    if shape.rows:
        return [_prefill_row(contest, test) for test in shape.rows if test.prompt]
    long = [_prefill(contest, Test(tokens, 0, 1, 0)) for tokens in shape.prompts if tokens]
    return [*long, _prefill(contest, Test(20, 0, 16, 0))] if long else []


def _prefill_row(contest: Contest, test: Test) -> Case:
    return _prefill_behind(contest, test) if test.depth else _prefill(contest, test)


def _prefill(contest: Contest, test: Test) -> Case:
    many = test.batch > 1
    what = f"{test.batch} prompts of {test.prompt} tokens to all first tokens"
    return contest.case(
        test.label,
        what if many else f"one prompt of {test.prompt} tokens to its first token",
        lambda prompts: [Work(prompts.take(test.prompt), 2) for _ in range(test.batch)],
        [prefill(1.0)],
        together(test.batch) if many else None,
    )


def _prefill_behind(contest: Contest, test: Test) -> Case:
    """Return a turn of a conversation as a case. The turn before has an answer of one token, because mlx-lm's cache
    continues after an answer.

    mlx-lm has computed that token ahead. cortexmlx computes it now, one token more than is counted.
    """

    def turns(repetition: int) -> list[Work]:
        prompts = contest.prompts(test.label, repetition)
        return [Work(prompts.take(test.depth), 1), Work(prompts.take(test.prompt), 2)]

    def rate(trace: Trace) -> Figure:
        return per_second(test.prompt, trace.started, trace.prefilled)

    return Case(
        test.label,
        f"a prompt of {test.prompt} tokens to its first token, behind {test.depth} that are cached",
        lambda repetition: contest.cortex().chat(turns(repetition)),
        lambda repetition: contest.mlx_lm().chat(turns(repetition)),
        (Measure("prefill", "tok/s", rate, Better.HIGHER, 1.0),),
    )


def decode_cases(contest: Contest, shape: Shape) -> list[Case]:
    """Return 1, 8 and 16 rows at the same context. If the shape has rows, return those that generate."""
    if shape.rows:
        rows = [test for test in shape.rows if test.generate]
        return [_decode(contest, t.label, t.batch, t.depth or 1, t.generate + 1) for t in rows]
    usual = [(generate, rows) for generate in shape.generates if generate for rows in _DECODING]
    return [_decode(contest, f"tg{generate} x{rows}", rows, shape.context, generate) for generate, rows in usual]


def _decode(contest: Contest, name: str, rows: int, context: int, tokens: int) -> Case:
    return contest.case(
        name,
        f"{rows} row{'s' * (rows > 1)} decode behind prompts of {context} token{'s' * (context > 1)}",
        lambda prompts: [Work(prompts.take(context), tokens) for _ in range(rows)],
        [decode(0.95 if rows == 1 else 1.0)],
        together(rows),
    )
