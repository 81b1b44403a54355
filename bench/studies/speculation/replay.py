"""Tokens per second with drafts and without, on texts that are known: what is chosen is scripted, what is computed is
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
from cortexmlx.bench.measure.machine import Machine
from cortexmlx.bench.replay.runs import Measured, measure, workload
from cortexmlx.bench.replay.texts import Kind
from cortexmlx.cpu import blas

TOKENS = {Kind.EDIT: 400, Kind.QUOTES: 256, Kind.JSON: 400, Kind.SCHEMA: 400, Kind.PROSE: 256}
"""Tokens of an answer at most."""

HEAD = (
    "rows  text    3-grams  5-grams  without     with   ratio       (range)   CPU  whole"
    "  drafted accepted  a step  verified"
)
"""Shares of n-grams; tokens per second until the first answer ends; ratios of the pairs, by wall and CPU time, and by
wall time until the last answer ends; tokens of a run; tokens of a row's step, and of one that verified drafts.
"""


def line(found: Measured) -> str:
    """Return the figures of a workload, as `HEAD` has them. Tokens per second are medians, other figures means."""
    work, runs = found.workload, found.speculating
    rates = (statistics.median(run.together.rate for run in side) for side in (found.plain, runs))
    drafted, accepted = (
        statistics.fmean(getattr(run.drafts, name) for run in runs) for name in ("drafted", "accepted")
    )
    per_step = statistics.fmean(run.tokens_per_step for run in runs)
    verifying = statistics.fmean(run.drafts.tokens_per_step for run in runs)
    grams = "".join(f"{work.repetition(order):9.2f}" for order in (3, 5))
    speeds = "".join(f"{rate:9.1f}" for rate in rates)
    spread = f"({min(found.ratios):.2f}-{max(found.ratios):.2f})"
    others = f"{found.cpu_ratio:6.2f}{found.whole_ratio:7.2f}"
    return (
        f"{work.rows:4}  {work.kind.value:6}{grams}{speeds}  {found.ratio:5.2f}x {spread:>13}{others}"
        f"{drafted:9,.0f}{accepted:9,.0f}{per_step:8.2f}{verifying:10.2f}"
    )


def study(model: str, rows: int, tokens: dict[Kind, int], pairs: int, live: bool, **options: Any) -> Iterator[Measured]:
    """Yield the pairs of each kind of text, for answers of `tokens` tokens. `options` are those of the engine that
    speculates.
    """
    config: dict[str, Any] = {"max_rows": rows, "kv_memory": "1GB", "token_target": None}
    with (
        Engine(model, **config, speculate=False, forced_tokens=False) as plain,
        Engine(model, **config | options) as speculating,
    ):
        works = [workload(kind, pairs, rows, most, plain, live) for kind, most in tokens.items()]
        yield from measure(plain, speculating, works, lambda what: print(what, file=sys.stderr))


def _kinds(text: str) -> list[Kind]:
    """Return the kinds of text that a list names, in any case. Raises ArgumentTypeError."""
    names = {kind.value.lower(): kind for kind in Kind}
    if unknown := [name for name in text.split(",") if name.strip().lower() not in names]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(kind.value for kind in Kind)}")
    return [names[name.strip().lower()] for name in text.split(",")]


def _count(text: str) -> int:
    """Return a number of at least 1. Raises ArgumentTypeError."""
    if not text.strip().isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)


def _numbers(text: str) -> list[int]:
    """Return the numbers of a list, each at least 1. Raises ArgumentTypeError."""
    if not all(number.strip().isdecimal() and int(number) for number in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers from 1 on, such as 1,8")
    return [int(number) for number in text.split(",")]


def main(arguments: list[str] | None = None) -> None:
    """Run the study and print its figures."""
    parser = argparse.ArgumentParser(
        prog="python -m cortexmlx.bench.studies.speculation.replay", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--rows", type=_numbers, default="1,8,16", help="answers at once, a list")
    parser.add_argument("--tokens", type=_count, help="of an answer at most (default: 400 of edits and JSON, else 256)")
    parser.add_argument("--pairs", type=_count, default=5)
    every = ",".join(kind.value for kind in Kind)
    parser.add_argument("--kinds", type=_kinds, default=every, help=f"kinds of text, a list (default: {every})")
    parser.add_argument("--live", action="store_true", help="the model's own choices at temperature 0.8")
    asked = parser.parse_args(arguments)
    tokens = {kind: asked.tokens or TOKENS[kind] for kind in asked.kinds}
    blas.preload()  # before the machine is described
    print(*Machine.here().lines(), HEAD, sep="\n")
    for rows in asked.rows:
        for found in study(asked.model, rows, tokens, asked.pairs, asked.live):
            print(line(found), flush=True)
            answers = rows * asked.pairs
            if found.same < answers:
                print(f"      other tokens in {answers - found.same} of {answers} answers")


if __name__ == "__main__":
    main()
