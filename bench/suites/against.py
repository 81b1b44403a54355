"""The cases of `cortexmlx bench --against mlx-lm`: prefill and decode, alone and in batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from cortexmlx.bench.measure.mlxlm import BatchSettings, MlxLm
from cortexmlx.bench.measure.pairs import Better, Case, Measure
from cortexmlx.bench.measure.prompts import Prompts
from cortexmlx.bench.measure.subject import Cortex
from cortexmlx.bench.measure.trace import Trace, Work
from cortexmlx.engine import Engine

ROWS = 16
"""Rows that the engine needs for these cases."""


@dataclass(frozen=True)
class Shape:
    """Sizes of the cases, in tokens: the long prompt, the context at which decoding begins, the generated tokens."""

    prompt: int = 512
    context: int = 128
    generate: int = 128


class Contest:
    """Both sides on one engine's weights, and where prompts come from: the same ones for both sides of a pair.

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
        """A fresh stream of prompts for a repetition of a case."""
        seed = sum(case.encode()) + 1_000 * repetition + 1_000_000 * self._seed
        return Prompts(self.engine.info.vocab_size, seed)

    def cortex(self, *, watch_kv: bool = False, background: bool = False) -> Cortex:
        """cortexmlx, with a look at the KV memory if `watch_kv`, and with `background` requests."""
        return Cortex(self.engine, watch_kv=watch_kv, background=background)

    def mlx_lm(self, settings: BatchSettings | None = None, *, prompt_cache: bool = True) -> MlxLm:
        """mlx-lm on the engine's weights."""
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
        """A case in which both sides run the same work; `settings` watch the KV memory on both sides or on none.
        `background`: only the end of all counts, as in `Engine.generate_batch`."""
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
    """Cases that share an engine: with the engine's own target for the time between two tokens, or (`token_target`
    False) with prompts computed in full chunks whoever decodes."""

    cases: Callable[[Contest], list[Case]]
    token_target: bool = True


def prefill(target: float) -> Measure:
    """Prompt tokens per second until all requests have a token."""
    return Measure("prefill", "tok/s", Trace.prefill_rate, Better.HIGHER, target)


def decode(target: float) -> Measure:
    """Tokens per second while all rows decode."""
    return Measure("decode", "tok/s", Trace.decode_rate, Better.HIGHER, target)


def together(rows: int) -> BatchSettings:
    """mlx-lm's best settings for requests that come all at once: one prefill for all of them."""
    return BatchSettings(completion_batch_size=rows, prefill_batch_size=rows)


def basic_sections(shape: Shape) -> list[Section]:
    """Prefill of one long and of many short prompts; decode alone, with 8 and with 16 rows."""
    return [
        Section(lambda contest: prefill_cases(contest, shape)),
        Section(lambda contest: decode_cases(contest, shape), token_target=False),
    ]


def prefill_cases(contest: Contest, shape: Shape) -> list[Case]:
    """One long prompt, and sixteen short ones."""
    return [
        contest.case(
            f"pp{shape.prompt}",
            f"one prompt of {shape.prompt} tokens to its first token",
            lambda prompts: [Work(prompts.take(shape.prompt), 2)],
            [prefill(1.0)],
        ),
        contest.case(
            "pp20 x16",
            "16 prompts of 20 tokens to all first tokens",
            lambda prompts: [Work(prompts.take(20), 2) for _ in range(16)],
            [prefill(1.0)],
            together(16),
        ),
    ]


def decode_cases(contest: Contest, shape: Shape) -> list[Case]:
    """One row, 8 and 16 rows at the same context."""

    def decoding(rows: int) -> Callable[[Prompts], list[Work]]:
        return lambda prompts: [Work(prompts.take(shape.context), shape.generate) for _ in range(rows)]

    return [
        contest.case(
            f"tg{shape.generate} x{rows}",
            f"{rows} row{'s' * (rows > 1)} decode behind prompts of {shape.context} tokens",
            decoding(rows),
            [decode(target)],
            together(rows),
        )
        for rows, target in ((1, 0.95), (8, 1.0), (16, 1.0))
    ]
