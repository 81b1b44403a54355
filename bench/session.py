"""One `cortexmlx bench`: engines opened as the tests need them, everything measured, one report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

from cortexmlx.bench.measure.machine import Machine
from cortexmlx.bench.measure.pairs import Case, Comparison, compare
from cortexmlx.bench.measure.prompts import Prompts
from cortexmlx.bench.measure.trace import Work
from cortexmlx.bench.report import Report
from cortexmlx.bench.suites.against import ROWS, Contest, Section, Shape, basic_sections
from cortexmlx.bench.suites.rows import Row, measure, tests
from cortexmlx.bench.suites.serving import CONTEXTS, DECODED, serving_sections
from cortexmlx.engine import Engine
from cortexmlx.errors import InvalidRequest
from cortexmlx.stats import ModelInfo

WARM_UP = ((64, 8), (300, 4))
"""Prompt and generated tokens of the runs that both sides make before the first pair."""

INTERRUPTED = "interrupted: only the cases that were complete"


@dataclass(frozen=True)
class Plan:
    """What holds for every test: the model, lines about it, KV memory in bytes (None: what the tests need), the
    attention backend, repetitions, the prompts' seed, whom to tell what is running, the model's adapter, and how keys
    and values are quantized."""

    model: str
    notes: tuple[str, ...]
    kv_memory: int | None
    attention: str
    repetitions: int
    seed: int
    on_run: Callable[[str], None] | None
    adapter: str | None = None
    kv_bits: int | None = None
    kv_group_size: int | None = None


def measure_rows(
    plan: Plan,
    prompts: Sequence[int],
    generates: Sequence[int],
    batches: Sequence[int],
    depths: Sequence[int],
    block_sizes: Sequence[int],
) -> Report:
    """The rows of all combinations. Raises InvalidRequest if the model's context is too short for one."""
    wanted = tests(prompts, generates, batches, depths)
    if not wanted:
        raise InvalidRequest("nothing to measure: give prompt tokens (-p) or tokens to generate (-n)")
    rows: list[Row] = []
    for block_size in block_sizes:
        needed = max(test.tokens + test.batch * 2 * block_size for test in wanted)
        with _engine(plan, block_size, max(batches), needed, token_target=False, prefix_cache=False) as engine:
            info = engine.info
            longest = max(test.tokens // test.batch for test in wanted)
            if longest > info.context_length:
                raise InvalidRequest(
                    f"a test needs {longest} tokens per row, and the model's context is {info.context_length}: "
                    "lower -p, -n or -d"
                )
            rows += measure(engine, wanted, plan.repetitions, Prompts(info.vocab_size, plan.seed), plan.on_run)
    return Report(Machine.here(), info, tuple(rows), notes=plan.notes)


def compare_with_mlx_lm(
    plan: Plan, suites: Sequence[str], only: str | None, prompt: int, generate: int, block_size: int
) -> Report:
    """The comparisons of the suites "basic" and "serving": see `compare_sections`."""
    shape = Shape(prompt=prompt or Shape.prompt, generate=generate or Shape.generate)
    sections = basic_sections(shape) if "basic" in suites else []
    sections += serving_sections() if "serving" in suites else []
    return compare_sections(plan, sections, shape, only, block_size)


def compare_sections(
    plan: Plan, sections: Sequence[Section], shape: Shape, only: str | None, block_size: int
) -> Report:
    """The comparisons of some sections, in sizes of `shape`; `only` keeps cases with that text in their name.

    An interrupt ends it with the cases that are complete, if there are any. Raises InvalidRequest if no case is left.
    """
    row = max(CONTEXTS[1] + DECODED, shape.context + shape.generate) + 2 * block_size
    tokens = max(ROWS * row, shape.prompt + block_size)
    found: list[Comparison] = []
    info: ModelInfo | None = None
    names: list[str] = []
    interrupted = False
    try:
        for section in sections:
            with ExitStack() as stack:
                contest = _contest(plan, stack, section, block_size, tokens)
                cases = section.cases(contest)
                names += [case.name for case in cases]
                chosen = _chosen(cases, only)
                if chosen:
                    info = contest.engine.info
                    _warm_up(contest)
                for case in chosen:
                    found += compare(case, plan.repetitions, plan.on_run)
    except KeyboardInterrupt:
        if not found:
            raise
        interrupted = True
    if info is None:
        raise InvalidRequest(f"no case has {only!r} in its name; there are: {', '.join(names)}")
    notes = (*plan.notes, *((INTERRUPTED,) if interrupted else ()))
    return Report(Machine.here(), info, comparisons=tuple(found), notes=notes, interrupted=interrupted)


def _contest(plan: Plan, stack: ExitStack, section: Section, block_size: int, tokens: int) -> Contest:
    """A contest whose engine opens when it is needed and closes with `stack`."""

    def open_engine() -> Engine:
        return stack.enter_context(_engine(plan, block_size, ROWS, tokens, token_target=section.token_target))

    return Contest(open_engine, plan.seed)


def _chosen(cases: Sequence[Case], only: str | None) -> list[Case]:
    """The case with that very name, else those with that text in their name; all if there is no text."""
    named = [case for case in cases if case.name == only]
    return named or [case for case in cases if only is None or only in case.name]


def _warm_up(contest: Contest) -> None:
    prompts = contest.prompts("warm-up", 0)
    for length, tokens in WARM_UP:
        for rows in (1, 8):
            work = [Work(prompts.take(length), tokens) for _ in range(rows)]
            contest.cortex().run(work)
            contest.mlx_lm().run(work)


@contextmanager
def _engine(
    plan: Plan, block_size: int, max_rows: int, tokens: int, *, token_target: bool, prefix_cache: bool = True
) -> Iterator[Engine]:
    """An engine that holds `tokens` tokens: with its default memory if that is enough, else with as much as needed.

    `token_target`: with the engine's own target for the time between two tokens, or none.
    """
    if plan.on_run is not None:
        plan.on_run(f"loading {plan.model}, block size {block_size}")

    def opened(kv_memory: int | None) -> Engine:
        make = Engine if token_target else partial(Engine, token_target=None)
        return make(
            plan.model,
            adapter=plan.adapter,
            kv_memory=kv_memory,
            kv_bits=plan.kv_bits,
            kv_group_size=plan.kv_group_size,
            block_size=block_size,
            max_rows=max_rows,
            attention=plan.attention,
            prefix_cache=prefix_cache,
        )

    engine = opened(plan.kv_memory)
    per_token = engine.info.kv_bytes_per_token
    if plan.kv_memory is None and engine.stats().kv_bytes_limit < tokens * per_token:
        needed = (tokens + block_size) * per_token
        engine.close()
        engine = opened(needed)
    with engine:
        yield engine
