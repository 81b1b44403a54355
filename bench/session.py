"""One `cortexmlx bench`: opens the engines that the tests need, measures everything, and makes one report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from cortexmlx.bench.measure.engines import Plan, open_engines
from cortexmlx.bench.measure.machine import Machine
from cortexmlx.bench.measure.pairs import Case, Comparison, compare
from cortexmlx.bench.measure.prompts import Prompts
from cortexmlx.bench.measure.trace import Work
from cortexmlx.bench.measure.yardstick import Yardstick
from cortexmlx.bench.report import ratios, speed
from cortexmlx.bench.report import traffic as traffic_report
from cortexmlx.bench.report.report import Report
from cortexmlx.bench.suites.against import ROWS, Contest, Section, Shape, basic_sections
from cortexmlx.bench.suites.arrivals import ROWS as ARRIVING
from cortexmlx.bench.suites.arrivals import Promise, Served, Traffic, serve
from cortexmlx.bench.suites.rows import Runs, Test
from cortexmlx.bench.suites.serving import CONTEXTS, DECODED, serving_sections
from cortexmlx.engine import Engine
from cortexmlx.errors import InvalidRequest
from cortexmlx.stats import ModelInfo

WARM_UP = ((64, 8), (300, 4))
"""Prompt and generated tokens of the runs that both sides make before the first pair."""

_NOTHING = "nothing to measure: give prompt tokens (-p) or tokens to generate (-n)"

INTERRUPTED = "interrupted: what was measured so far"


def measure_rows(plan: Plan, wanted: Sequence[Test], block_sizes: Sequence[int]) -> Report:
    """Measure all tests with blocks of all sizes. An interrupt ends it with the runs so far, if there are any.

    Raises InvalidRequest if the model's context is too short for a test, or if there are no tests.
    """
    if not wanted:
        raise InvalidRequest(_NOTHING)
    machine = Machine.here()
    sizes = [(size, max(test.tokens + test.batch * 2 * size for test in wanted)) for size in block_sizes]
    batch = max(test.batch for test in wanted)
    check = partial(_check_context, max(test.tokens // test.batch for test in wanted), "a test", ": lower -p, -n or -d")
    runs: Runs | None = None
    interrupted = False
    try:
        for number, turns in enumerate(plan.turns()):
            with ExitStack() as stack:
                engines = open_engines(plan, stack, sizes, batch, check, token_target=None, prefix_cache=False)
                if runs is None:
                    info = next(iter(engines.values())).info
                    runs = Runs(block_sizes, wanted, Prompts(info.vocab_size, plan.seed), plan.repetitions)
                runs.measure(engines, turns, number, plan.on_run)
    except KeyboardInterrupt:
        if runs is None or not runs.rows():
            raise
        interrupted = True
    assert runs is not None
    backend = "CPU" if machine.device == "CPU" else "Metal"
    return Report(
        machine,
        info,
        (speed.part(runs.rows(), info, backend),),
        (*plan.notes, *_ended(interrupted)),
        plan.settings,
        runs.yardstick(),
        interrupted,
    )


def _check_context(tokens: int, what: str, next_step: str, info: ModelInfo) -> None:
    if tokens > info.context_length:
        raise InvalidRequest(
            f"{what} needs {tokens} tokens per row, and the model's context is {info.context_length}{next_step}"
        )


def measure_trace(plan: Plan, traffic: Traffic, promise: Promise, against: bool, block_size: int) -> Report:
    """Measure requests that arrive at random, alone or beside mlx-lm's batch generator.

    An interrupt ends it with the complete runs, if there are any. Raises InvalidRequest if the model's context is too
    short.
    """
    machine, sides, yardstick = Machine.here(), list[Served](), Yardstick()
    interrupted = False
    with ExitStack() as stack:
        tokens = ARRIVING * (traffic.longest + 2 * block_size)
        check = partial(_check_context, traffic.longest, "the trace", "")
        engine = open_engines(plan, stack, [(block_size, tokens)], ARRIVING, check)[block_size]
        info = engine.info
        try:
            serve(engine, traffic, promise, plan.repetitions, plan.seed, against, sides, plan.tell, yardstick.sample)
        except KeyboardInterrupt:
            if not (sides and sides[-1].traces):
                raise
            interrupted = True
    notes = (*plan.notes, "the trace has shared system prompts: cortexmlx finds them in its prefix cache")
    part = traffic_report.part(sides, traffic)
    return Report(
        machine, info, (part,), (*notes, *_ended(interrupted)), plan.settings, yardstick.seconds(), interrupted
    )


def compare_with_mlx_lm(
    plan: Plan, suites: Sequence[str], only: Sequence[str], shape: Shape, block_size: int
) -> Report:
    """Run the comparisons of the suites "basic" and "serving": see `compare_sections`."""
    sections = basic_sections(shape) if "basic" in suites else []
    sections += serving_sections() if "serving" in suites else []
    return compare_sections(plan, sections, shape, only, block_size)


def compare_sections(
    plan: Plan, sections: Sequence[Section], shape: Shape, only: Sequence[str], block_size: int
) -> Report:
    """Run the comparisons of some sections, with the sizes of `shape`. `only` keeps the cases with one of these texts
    in their name; if it is empty, all cases.

    An interrupt ends it with the complete cases, if there are any. Raises InvalidRequest if no case has one of the
    texts, or if there are no cases. Also if the model's context is too short for a case.
    """
    machine = Machine.here()
    tokens = max(ROWS * (CONTEXTS[1] + DECODED + 2 * block_size), shape.tokens(block_size))
    engine = partial(_engine, plan, shape, block_size, tokens)
    found: list[Comparison] = []
    info: ModelInfo | None = None
    stacks = [ExitStack() for _ in sections]
    contests = [Contest(partial(engine, stack, s), plan.seed) for stack, s in zip(stacks, sections, strict=True)]
    cases = [section.cases(contest) for section, contest in zip(sections, contests, strict=True)]
    if not any(cases):
        raise InvalidRequest(_NOTHING)
    chosen = _chosen([case for each in cases for case in each], only)
    interrupted = False
    try:
        for stack, contest, each in zip(stacks, contests, cases, strict=True):
            with stack:
                wanted = [case for case in each if case in chosen]
                if wanted:
                    info = contest.engine.info
                    _warm_up(contest, plan.tell)
                for case in wanted:
                    found += compare(case, plan.repetitions, plan.on_run)
    except KeyboardInterrupt:
        if not found:
            raise
        interrupted = True
    notes = (*plan.notes, *_ended(interrupted))
    return Report(machine, info, (ratios.part(found),), notes, plan.settings, interrupted=interrupted)


def _ended(interrupted: bool) -> tuple[str, ...]:
    return (INTERRUPTED,) if interrupted else ()


def _engine(plan: Plan, shape: Shape, block_size: int, tokens: int, stack: ExitStack, section: Section) -> Engine:
    """Return the engine of a section, closed with `stack`."""
    options: dict[str, Any] = {} if section.token_target else {"token_target": None}
    check = partial(_check_context, shape.longest, "a case", ": lower -p, -n or -d")
    return open_engines(plan, stack, [(block_size, tokens)], shape.batch, check, **options)[block_size]


def _chosen(cases: Sequence[Case], only: Sequence[str]) -> list[Case]:
    """Return, for each text, the case with this name, or else the cases with the text in their name. Without texts,
    return all cases.

    Raises InvalidRequest for a text that no case has.
    """
    chosen = [] if only else list(cases)
    for text in only:
        named = [case for case in cases if case.name == text] or [case for case in cases if text in case.name]
        if not named:
            names = ", ".join(case.name for case in cases)
            raise InvalidRequest(f"no case has {text!r} in its name; there are: {names}")
        chosen += named
    return chosen


def combined(reports: Sequence[Report]) -> Report:
    """Return several reports of one command as one."""
    first = reports[0]
    models = [report.model for report in reports if report.model is not None]
    return Report(
        first.machine,
        models[0] if models else None,
        tuple(part for report in reports for part in report.parts),
        tuple(dict.fromkeys(note for report in reports for note in report.notes)),
        {name: value for report in reports for name, value in report.settings.items()},
        {
            name: tuple(value for report in reports for value in report.yardstick.get(name, ()))
            for name in dict.fromkeys(name for report in reports for name in report.yardstick)
        },
        any(report.interrupted for report in reports),
    )


def _warm_up(contest: Contest, tell: Callable[[str], None]) -> None:
    """Run work that is not measured, because the first steps of a kind take longer on each side."""
    prompts = contest.prompts("warm-up", 0)
    for length, tokens in WARM_UP:
        for rows in (1, 8):
            work = [Work(prompts.take(length), tokens) for _ in range(rows)]
            asked = f"warming up, {rows} prompt{'s' * (rows > 1)} of {length} tokens"
            tell(f"{asked}: cortexmlx")
            contest.cortex().run(work)
            tell(f"{asked}: mlx-lm")
            contest.mlx_lm().run(work)
