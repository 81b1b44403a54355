"""The cases of `cortexmlx bench --against mlx-lm`: prefill and decode, alone and in batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cortexmlx.bench.mlxlm import BatchSettings, MlxLm
from cortexmlx.bench.pairs import Better, Case, Measure
from cortexmlx.bench.prompts import Prompts
from cortexmlx.bench.subject import Cortex, loaded_model
from cortexmlx.bench.trace import Trace, Work
from cortexmlx.engine import Engine

ROWS = 16
"""Rows that the engine needs for these cases."""


@dataclass(frozen=True)
class Shape:
    """Sizes of the cases, in tokens: the long prompt, the context at which decoding begins, the generated tokens."""

    prompt: int = 512
    context: int = 128
    generate: int = 128


@dataclass(frozen=True)
class Contest:
    """Both sides on one engine's weights, and where prompts come from: the same ones for both sides of a pair."""

    engine: Engine
    seed: int

    def prompts(self, case: str, repetition: int) -> Prompts:
        """A fresh stream of prompts for a repetition of a case."""
        seed = sum(case.encode()) + 1_000 * repetition + 1_000_000 * self.seed
        return Prompts(self.engine.info.vocab_size, seed)

    def cortex(self, *, watch_kv: bool = False) -> Cortex:
        """cortexmlx, with a look at the KV memory if `watch_kv`."""
        return Cortex(self.engine, watch_kv=watch_kv)

    def mlx_lm(self, settings: BatchSettings | None = None, *, prompt_cache: bool = True) -> MlxLm:
        """mlx-lm on the engine's weights."""
        return MlxLm(loaded_model(self.engine), settings, prompt_cache=prompt_cache)

    def case(
        self,
        name: str,
        what: str,
        work: Callable[[Prompts], Sequence[Work]],
        measures: Sequence[Measure],
        settings: BatchSettings | None = None,
    ) -> Case:
        """A case in which both sides run the same work; `settings` watch the KV memory on both sides or on none."""
        ours = self.cortex(watch_kv=settings is not None and settings.watch_kv)
        theirs = self.mlx_lm(settings)

        def run(side: Cortex | MlxLm) -> Callable[[int], Trace]:
            return lambda repetition: side.run(work(self.prompts(name, repetition)))

        return Case(name, what, run(ours), run(theirs), tuple(measures))


def prefill(target: float) -> Measure:
    """Prompt tokens per second until all requests have a token."""
    return Measure("prefill", "tok/s", Trace.prefill_rate, Better.HIGHER, target)


def decode(target: float) -> Measure:
    """Tokens per second while all rows decode."""
    return Measure("decode", "tok/s", Trace.decode_rate, Better.HIGHER, target)


def together(rows: int) -> BatchSettings:
    """mlx-lm's best settings for requests that come all at once: one prefill for all of them."""
    return BatchSettings(completion_batch_size=rows, prefill_batch_size=rows)


def basic_cases(contest: Contest, shape: Shape) -> list[Case]:
    """Prefill of one long and of many short prompts; decode alone, with 8 and with 16 rows."""
    cases = [
        contest.case(
            f"pp{shape.prompt}",
            f"one prompt of {shape.prompt} tokens to its first token",
            lambda prompts: [Work(prompts.take(shape.prompt), 2)],
            [prefill(1.0)],
        ),
        contest.case(
            "pp16x20",
            "16 prompts of 20 tokens to all first tokens",
            lambda prompts: [Work(prompts.take(20), 2) for _ in range(16)],
            [prefill(1.0)],
            together(16),
        ),
    ]
    for rows, target in ((1, 0.95), (8, 1.0), (16, 1.0)):
        cases.append(
            contest.case(
                f"tg{shape.generate} x{rows}",
                f"{rows} rows decode {shape.generate} tokens each behind prompts of {shape.context}",
                _decoding(rows, shape),
                [decode(target)],
                together(rows),
            )
        )
    return cases


def _decoding(rows: int, shape: Shape) -> Callable[[Prompts], list[Work]]:
    return lambda prompts: [Work(prompts.take(shape.context), shape.generate) for _ in range(rows)]
