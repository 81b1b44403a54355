"""The section of `cortexmlx bench --speculate`: what drafts save, for each kind of text and number of rows."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from cortexmlx.bench.measure.engines import BenchPlan, open_engines, share_weights
from cortexmlx.bench.measure.machine import BenchMachine
from cortexmlx.bench.replay.runs import WorkloadResult, make_workload, measure_workloads
from cortexmlx.bench.replay.texts import AnswerKind
from cortexmlx.bench.report import Report, ReportSection, ReportTable, format_number
from cortexmlx.stats import ModelInfo

TOKENS = 256
"""Tokens of an answer."""

_ROOM = 1_200
"""Tokens of a prompt and its answer at most. A prompt has a text of up to twice as many tokens as the answer."""

HEADINGS = ("text", "rows", "repeated", "without", "with", "ratio", "least", "most", "drafted", "accepted", "a step")
BELOW = (
    "Each kind of text is known before: the model computes every step, and then the known token is taken. "
    "repeated: the share of the answers' 5-grams that came earlier in prompt or answer. without, with: tokens per "
    "second without drafts and with them, until the first answer ends. ratio: the median of the pairs of runs, and "
    "the least and the greatest of them. a step: tokens that a step of a row gives.",
)


def measure_speculation(plan: BenchPlan, rows: Sequence[int], block_size: int, tokens: int = TOKENS) -> Report:
    """Measure answers of each kind of text with drafts and without, for each number of rows. Return the report.

    An interrupt ends it with the complete pairs, if there are any.
    """
    machine, results, interrupted = BenchMachine.detect(), list[WorkloadResult](), False
    with ExitStack() as stack:
        sizes = [(block_size, max(rows) * (_ROOM + 2 * block_size))]
        make_engines = partial(open_engines, plan, stack, sizes, max(rows), token_target=None)
        speculating_engine, plain_engine = (
            make_engines()[block_size],
            make_engines(speculate=False, forced_tokens=False)[block_size],
        )
        share_weights(plain_engine, speculating_engine)
        info: ModelInfo = plain_engine.info
        try:
            for count in rows:
                works = [make_workload(kind, plan.repetitions, count, tokens, plain_engine) for kind in AnswerKind]
                results += measure_workloads(plain_engine, speculating_engine, works, plan.report_progress)
        except KeyboardInterrupt:
            if not results:
                raise
            interrupted = True
    notes = (*plan.notes, *(("interrupted: what was measured so far",) if interrupted else ()))
    return Report(machine, info, speculation_section(results), notes, plan.settings, interrupted=interrupted)


def speculation_section(results: Sequence[WorkloadResult]) -> ReportSection:
    """Return the report's section about drafts: a row for each kind of text and number of rows."""
    table = ReportTable(
        HEADINGS, tuple(map(_table_row, results)), 1, ("most", "least", "drafted", "accepted", "without")
    )
    return ReportSection("speculation", "With drafts and without", (table,), BELOW, tuple(map(_json_record, results)))


def _table_row(result: WorkloadResult) -> tuple[str, ...]:
    figures = _json_record(result)
    return (
        result.workload.kind.value,
        str(result.workload.rows),
        f"{figures['repeated']:.0%}",
        format_number(figures["without"]),
        format_number(figures["with"]),
        f"{result.ratio:.2f}x",
        f"{min(result.ratios):.2f}",
        f"{max(result.ratios):.2f}",
        format_number(figures["drafted"]),
        format_number(figures["accepted"]),
        f"{figures['tokens_per_step']:.2f}",
    )


def _json_record(result: WorkloadResult) -> dict[str, Any]:
    """Return the figures of a workload for JSON: speeds are medians, counts are means over the runs."""
    runs = result.speculating_runs
    return {
        "text": result.workload.kind.value,
        "rows": result.workload.rows,
        "repeated": result.workload.mean_repetition(5),
        "without": statistics.median(run.concurrent_span.tokens_per_second for run in result.plain_runs),
        "with": statistics.median(run.concurrent_span.tokens_per_second for run in runs),
        "ratio": result.ratio,
        "ratios": result.ratios,
        "cpu_ratio": result.cpu_ratio,
        "whole_ratio": result.whole_ratio,
        "drafted": statistics.fmean(run.drafts.drafted for run in runs),
        "accepted": statistics.fmean(run.drafts.accepted for run in runs),
        "tokens_per_step": statistics.fmean(run.tokens_per_step for run in runs),
    }
