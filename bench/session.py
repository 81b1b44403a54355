"""Runs one `cortexmlx bench`: opens the engines that the tests need, measures everything, and returns one report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import Any

from cortexmlx.bench.measure.engines import BenchPlan, open_engines
from cortexmlx.bench.measure.machine import BenchMachine
from cortexmlx.bench.measure.pairs import Comparison, ComparisonCase, compare_case
from cortexmlx.bench.measure.prompts import PromptStream
from cortexmlx.bench.measure.trace import BenchRequest
from cortexmlx.bench.report import GIB, Report, ReportSection, ReportTable, format_number
from cortexmlx.bench.suites.against import ROWS, CaseSection, ComparisonSizes, Contest, basic_sections
from cortexmlx.bench.suites.rows import SpeedTest, TestResult, TestRuns
from cortexmlx.bench.suites.serving import CONTEXTS, DECODED, serving_sections
from cortexmlx.engine import Engine
from cortexmlx.errors import InvalidRequest
from cortexmlx.stats import ModelInfo

WARM_UP = ((64, 8), (300, 4))
"""Prompt and generated tokens of the runs that both sides make before the first pair."""

_NOTHING = "nothing to measure: give prompt tokens (-p) or tokens to generate (-n)"

INTERRUPTED = "interrupted: what was measured so far"


def measure_rows(plan: BenchPlan, tests: Sequence[SpeedTest], block_sizes: Sequence[int]) -> Report:
    """Measure all tests of prefill and generation speed with each block size. An interrupt ends it with the runs so
    far, if there are any.

    Raises InvalidRequest if the model's context is too short for a test, or if there are no tests.
    """
    if not tests:
        raise InvalidRequest(_NOTHING)
    machine = BenchMachine.detect()
    sizes = [(size, max(test.tokens + test.batch * 2 * size for test in tests)) for size in block_sizes]
    batch = max(test.batch for test in tests)
    check = partial(_check_context, max(test.tokens // test.batch for test in tests), "a test", ": lower -p, -n or -d")
    runs: TestRuns | None = None
    interrupted = False
    try:
        with ExitStack() as stack:
            engines = open_engines(plan, stack, sizes, batch, check, token_target=None, prefix_cache=False)
            info = next(iter(engines.values())).info
            runs = TestRuns(block_sizes, tests, PromptStream(info.vocab_size, plan.seed), plan.repetitions)
            runs.run_tests(engines, plan.on_run)
    except KeyboardInterrupt:
        if runs is None or not runs.results():
            raise
        interrupted = True
    assert runs is not None
    backend = "CPU" if machine.device == "CPU" else "Metal"
    return Report(
        machine,
        info,
        speed_section(runs.results(), info, backend),
        (*plan.notes, *_interrupted_notes(interrupted)),
        plan.settings,
        interrupted,
    )


def _check_context(tokens: int, subject: str, next_step: str, info: ModelInfo) -> None:
    """Raise InvalidRequest if `subject` needs more tokens than the model's context has."""
    if tokens > info.context_length:
        raise InvalidRequest(
            f"{subject} needs {tokens} tokens per row, and the model's context is {info.context_length}{next_step}"
        )


def compare_with_mlx_lm(
    plan: BenchPlan, suite: str, only: Sequence[str], shape: ComparisonSizes, block_size: int
) -> Report:
    """Compare with mlx-lm in the suite "basic" or "serving", as `compare_sections` does, and return the report."""
    sections = basic_sections(shape) if suite == "basic" else serving_sections()
    return compare_sections(plan, sections, shape, only, block_size)


def compare_sections(
    plan: BenchPlan, sections: Sequence[CaseSection], shape: ComparisonSizes, only: Sequence[str], block_size: int
) -> Report:
    """Compare with mlx-lm in the cases of these sections, with the sizes of `shape`. `only` keeps the cases with one
    of these texts in their name; if it is empty, all cases.

    An interrupt ends it with the complete cases, if there are any. Raises InvalidRequest if no case has one of the
    texts, or if there are no cases. Also if the model's context is too short for a case.
    """
    machine = BenchMachine.detect()
    tokens = max(ROWS * (CONTEXTS[1] + DECODED + 2 * block_size), shape.tokens(block_size))
    engine = partial(_open_engine, plan, shape, block_size, tokens)
    comparisons: list[Comparison] = []
    info: ModelInfo | None = None
    stacks = [ExitStack() for _ in sections]
    contests = [Contest(partial(engine, stack, s), plan.seed) for stack, s in zip(stacks, sections, strict=True)]
    cases = [section.cases(contest) for section, contest in zip(sections, contests, strict=True)]
    if not any(cases):
        raise InvalidRequest(_NOTHING)
    selected_cases = _select_cases([case for contest_cases in cases for case in contest_cases], only)
    interrupted = False
    try:
        for stack, contest, each in zip(stacks, contests, cases, strict=True):
            with stack:
                section_cases = [case for case in each if case in selected_cases]
                if section_cases:
                    info = contest.engine.info
                    _warm_up(contest, plan.report_progress)
                for case in section_cases:
                    comparisons += compare_case(case, plan.repetitions, plan.on_run)
    except KeyboardInterrupt:
        if not comparisons:
            raise
        interrupted = True
    notes = (*plan.notes, *_interrupted_notes(interrupted))
    return Report(machine, info, ratios_section(comparisons), notes, plan.settings, interrupted=interrupted)


def _interrupted_notes(interrupted: bool) -> tuple[str, ...]:
    return (INTERRUPTED,) if interrupted else ()


def _open_engine(
    plan: BenchPlan, shape: ComparisonSizes, block_size: int, tokens: int, stack: ExitStack, section: CaseSection
) -> Engine:
    """Open the engine of a section, closed with `stack`."""
    options: dict[str, Any] = {} if section.token_target else {"token_target": None}
    check = partial(_check_context, shape.longest, "a case", ": lower -p, -n or -d")
    return open_engines(plan, stack, [(block_size, tokens)], shape.batch, check, **options)[block_size]


def _select_cases(cases: Sequence[ComparisonCase], only: Sequence[str]) -> list[ComparisonCase]:
    """Return, for each text, the case with this name, or else the cases with the text in their name. Without texts,
    return all cases.

    Raises InvalidRequest for a text that no case has.
    """
    selected_cases = [] if only else list(cases)
    for text in only:
        matches = [case for case in cases if case.name == text] or [case for case in cases if text in case.name]
        if not matches:
            names = ", ".join(case.name for case in cases)
            raise InvalidRequest(f"no case has {text!r} in its name; there are: {names}")
        selected_cases += matches
    return selected_cases


def _warm_up(contest: Contest, on_run: Callable[[str], None]) -> None:
    """Run work on both sides that is not measured, because the first steps of a kind take longer."""
    prompts = contest.make_prompts("warm-up", 0)
    for length, tokens in WARM_UP:
        for rows in (1, 8):
            work = [BenchRequest(prompts.next_prompt(length), tokens) for _ in range(rows)]
            message = f"warming up, {rows} prompt{'s' * (rows > 1)} of {length} tokens"
            on_run(f"{message}: cortexmlx")
            contest.make_cortex().run(work)
            on_run(f"{message}: mlx-lm")
            contest.make_mlx_lm().run(work)


RATIO_HEADINGS = ("case", "measure", "cortexmlx", "mlx-lm", "ratio", "least", "most", "target", "met")
RATIO_NOTES = (
    "ratio: cortexmlx over mlx-lm, the median of the pairs of runs, and the least and the greatest of them. Of s and "
    "bytes less is better.",
)


def ratios_section(comparisons: Sequence[Comparison]) -> ReportSection:
    """Return the section that compares with mlx-lm: a row for each comparison, all figures below."""
    table = ReportTable(
        RATIO_HEADINGS, tuple(map(_comparison_row, comparisons)), 2, ("met", "least", "most", "measure")
    )
    raw = tuple(map(_raw_figures, comparisons))
    return ReportSection(
        "comparisons", "Beside mlx-lm", (table,), (*RATIO_NOTES, *raw), tuple(map(_comparison_record, comparisons))
    )


def _comparison_row(c: Comparison) -> tuple[str, ...]:
    return (
        c.case,
        f"{c.measure}, {c.unit}",
        format_number(sorted(c.ours)[len(c.ours) // 2]),
        format_number(sorted(c.theirs)[len(c.theirs) // 2]),
        f"{c.ratio:.2f}x",
        f"{min(c.ratios):.2f}",
        f"{max(c.ratios):.2f}",
        f"{c.better.value} {c.target:g}x",
        "yes" if c.meets_target else "no",
    )


def _comparison_record(c: Comparison) -> dict[str, Any]:
    derived_figures = {"ratio": c.ratio, "ratios": c.ratios, "cpu_ratio": c.cpu_ratio, "met": c.meets_target}
    return {**asdict(c), "better": c.better.value, **derived_figures}


def _raw_figures(c: Comparison) -> str:
    """Return all figures of a comparison as one line of text."""
    our_text, their_text = (", ".join(format_number(x) for x in figures) for figures in (c.ours, c.theirs))
    same_note = f"same tokens in {c.same_tokens} of {c.requests} requests"
    cpu = "" if c.cpu_ratio is None else f"; {c.cpu_ratio:.2f}x by CPU time"
    return f"{c.case}, {c.measure} ({c.what}): cortexmlx {our_text}; mlx-lm {their_text} {c.unit}{cpu}; {same_note}"


SPEED_NOTES = (
    "pp: prompt tokens per second up to the first token; tg: generated tokens per second; mean ± standard deviation of "
    "the runs. batch: sequences at once, whose tokens are counted together. Behind @ d: tokens that were there before, "
    "not timed.",
    "KV: what keys and values of the running sequences took at most; peak: all that MLX held, weights too.",
)


def speed_section(rows: Sequence[TestResult], model: ModelInfo, backend: str) -> ReportSection:
    """Return the section about speed, with the columns of llama-bench, and below it a table of memory."""
    core = (
        model.name.rstrip("/").rpartition("/")[2],
        f"{model.weight_bytes / 2**20:,.1f} MiB",
        _format_count(model.parameters),
        backend,
    )
    batches = any(row.test.batch > 1 for row in rows)
    cells = []
    for row in rows:
        sizes = (str(row.block_size), *((str(row.test.batch),) if batches else ()))
        cells.append((*core, *sizes, row.test.name, f"{row.mean:.2f} ± {row.deviation:.2f}"))
    spare = ("model", "size", "params", "backend")
    headings = (*spare, "block", *(("batch",) if batches else ()), "test", "t/s")
    speed = ReportTable(headings, tuple(cells), 1, spare)
    memory = ReportTable(
        ("test", "block", "batch", "KV MiB", "peak GiB"),
        tuple(
            (
                r.test.name,
                str(r.block_size),
                str(r.test.batch),
                f"{r.kv_bytes / 2**20:,.1f}",
                f"{r.peak_bytes / GIB:.2f}",
            )
            for r in rows
        ),
        1,
        ("peak GiB",),
    )
    return ReportSection(
        "rows",
        "Speed",
        (speed, memory),
        SPEED_NOTES,
        tuple(map(_speed_record, rows)),
    )


def _format_count(parameters: int) -> str:
    """Return a number of parameters in millions or billions."""
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e9 else f"{parameters / 1e6:.2f} M"


def _speed_record(row: TestResult) -> dict[str, Any]:
    return {
        "test": row.test.name,
        "prompt": row.test.prompt,
        "generate": row.test.generate,
        "batch": row.test.batch,
        "depth": row.test.depth,
        "block_size": row.block_size,
        "mean_tokens_per_second": row.mean,
        "standard_deviation": row.deviation,
        "tokens_per_second": row.rates,
        "tokens": row.tokens,
        "cpu_ms_per_token": row.cpu_ms_per_token,
        "kv_bytes": row.kv_bytes,
        "peak_bytes": row.peak_bytes,
        **{f"{part}_ms": value for part, value in asdict(row.split).items() if part != "steps"},
    }
