"""Measures tokens per second with drafts and without, on known texts: sampled tokens are scripted, the model's work is
real.

python -m cortexmlx.bench.studies.speculation.replay [MODEL] [--rows 1,8,16] [--tokens 400] [--pairs 5] [--live]

For each kind of text it prints how much of it is repetition, and the median ratio of the pairs with their range.
With --live, the model's own choices at temperature 0.8 are taken, with the same seeds on both sides.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from typing import Any

from cortexmlx import Engine
from cortexmlx.bench.measure.machine import BenchMachine
from cortexmlx.bench.replay.runs import WorkloadResult, make_workload, measure_workloads
from cortexmlx.bench.replay.texts import AnswerKind
from cortexmlx.cpu import blas

TOKENS = {
    AnswerKind.EDIT: 400,
    AnswerKind.QUOTES: 256,
    AnswerKind.JSON: 400,
    AnswerKind.SCHEMA: 400,
    AnswerKind.PROSE: 256,
}
"""Tokens of an answer at most."""

HEAD = (
    "rows  text    3-grams  5-grams  without     with   ratio       (range)   CPU  whole"
    "  drafted accepted  a step  verified"
)
"""Shares of n-grams; tokens per second until the first answer ends; ratios of the pairs, by wall and CPU time, and by
wall time until the last answer ends; tokens of a run; tokens of a row's step, and of one that verified drafts.
"""


def format_result(result: WorkloadResult) -> str:
    """Return the figures of a workload as a line below `HEAD`. Tokens per second are medians, other figures means."""
    work, runs = result.workload, result.speculating_runs
    rates = (
        statistics.median(run.concurrent_span.tokens_per_second for run in side_runs)
        for side_runs in (result.plain_runs, runs)
    )
    drafted, accepted = (
        statistics.fmean(getattr(run.drafts, name) for run in runs) for name in ("drafted", "accepted")
    )
    per_step = statistics.fmean(run.tokens_per_step for run in runs)
    tokens_per_verify = statistics.fmean(run.drafts.tokens_per_step for run in runs)
    grams = "".join(f"{work.mean_repetition(order):9.2f}" for order in (3, 5))
    speeds = "".join(f"{rate:9.1f}" for rate in rates)
    spread = f"({min(result.ratios):.2f}-{max(result.ratios):.2f})"
    other_ratios = f"{result.cpu_ratio:6.2f}{result.whole_ratio:7.2f}"
    return (
        f"{work.rows:4}  {work.kind.value:6}{grams}{speeds}  {result.ratio:5.2f}x {spread:>13}{other_ratios}"
        f"{drafted:9,.0f}{accepted:9,.0f}{per_step:8.2f}{tokens_per_verify:10.2f}"
    )


def run_study(
    model: str, rows: int, tokens: dict[AnswerKind, int], pairs: int, is_live: bool, **options: Any
) -> Iterator[WorkloadResult]:
    """Yield the result for each kind of text, for answers of `tokens` tokens. `options`: the speculating engine's."""
    config: dict[str, Any] = {"max_rows": rows, "kv_memory": "1GB", "token_target": None}
    with (
        Engine(model, **config, speculate=False, forced_tokens=False) as plain_engine,
        Engine(model, **config | options) as speculating_engine,
    ):
        works = [
            make_workload(kind, pairs, rows, max_tokens, plain_engine, is_live) for kind, max_tokens in tokens.items()
        ]
        yield from measure_workloads(plain_engine, speculating_engine, works, lambda what: print(what, file=sys.stderr))


def _parse_kinds(text: str) -> list[AnswerKind]:
    """Parse a list of kinds of text, in any case. Raises ArgumentTypeError."""
    names = {kind.value.lower(): kind for kind in AnswerKind}
    if unknown_names := [name for name in text.split(",") if name.strip().lower() not in names]:
        raise argparse.ArgumentTypeError(
            f"{unknown_names[0]!r} is none of {', '.join(kind.value for kind in AnswerKind)}"
        )
    return [names[name.strip().lower()] for name in text.split(",")]


def _parse_count(text: str) -> int:
    """Parse a number of at least 1. Raises ArgumentTypeError."""
    if not text.strip().isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)


def _parse_numbers(text: str) -> list[int]:
    """Parse a list of numbers of at least 1. Raises ArgumentTypeError."""
    if not all(number.strip().isdecimal() and int(number) for number in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers from 1 on, such as 1,8")
    return [int(number) for number in text.split(",")]


def main(arguments: list[str] | None = None) -> None:
    """Run the study and print its figures."""
    parser = argparse.ArgumentParser(
        prog="python -m cortexmlx.bench.studies.speculation.replay", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--rows", type=_parse_numbers, default="1,8,16", help="answers at once, a list")
    parser.add_argument(
        "--tokens", type=_parse_count, help="of an answer at most (default: 400 of edits and JSON, else 256)"
    )
    parser.add_argument("--pairs", type=_parse_count, default=5)
    all_kinds = ",".join(kind.value for kind in AnswerKind)
    parser.add_argument(
        "--kinds", type=_parse_kinds, default=all_kinds, help=f"kinds of text, a list (default: {all_kinds})"
    )
    parser.add_argument("--live", action="store_true", help="the model's own choices at temperature 0.8")
    options = parser.parse_args(arguments)
    tokens = {kind: options.tokens or TOKENS[kind] for kind in options.kinds}
    blas.preload()  # before the machine is described
    print(*BenchMachine.detect().lines(), HEAD, sep="\n")
    for rows in options.rows:
        for result in run_study(options.model, rows, tokens, options.pairs, options.live):
            print(format_result(result), flush=True)
            answers = rows * options.pairs
            if result.same_answers < answers:
                print(f"      other tokens in {answers - result.same_answers} of {answers} answers")


if __name__ == "__main__":
    main()
