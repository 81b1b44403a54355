"""Whether `cortexmlx bench --compare` reports a slower engine, and does not report an unchanged one.

`python -m cortexmlx.bench.studies.regression_detection [MODEL] [--runs N]`.

One run is saved. Then new processes compare themselves with it. Some are unchanged. Others have an engine that computes
the MLP of every twelfth, sixth or second layer twice, which costs about 5, 10 and 30 % of a step.

The figure is how often each kind is called slower. It should be never for the unchanged engine, and always for the
others. The table also has the changes that `--compare` measured. The rates are those of one machine on one day. On a
busy machine, small changes are lost in the noise.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

from cortexmlx.cpu import blas

SLOWER = 3
"""The exit code of a comparison that found a slower figure."""

EVERY = (0, 12, 6, 2)
"""The kinds of runs. n: the MLP of every n-th layer is computed twice; 0: of none."""

COMMAND = """\
from cortexmlx.bench.studies.regression_detection import slow_down
slow_down({every})
from cortexmlx.cli import main
main()"""
"""`cortexmlx` in the current interpreter, after its engine was slowed down."""

ARGUMENTS = ("-p", "64", "-n", "12")


@dataclass(frozen=True)
class Outcome:
    """The result of a run."""

    every: int
    """The MLP of every `every`-th layer was computed twice; 0: of none."""
    code: int
    """The exit code."""
    changes: dict[str, float]
    """The changes of all figures, by figure and clock."""
    verdicts: dict[str, str]
    """The verdicts on them."""


def slow_down(every: int) -> None:
    """Make a llama compute the MLP of every `every`-th layer twice from now on, with the same result. 0: of none."""
    blas.preload()  # before mlx is imported
    if not every:
        return
    from mlx_lm.models import llama

    once, calls = llama.MLP.__call__, count(1)

    def twice(self: Any, x: Any) -> Any:
        out = once(self, x)
        return out + 0 * once(self, x) if next(calls) % every == 0 else out

    llama.MLP.__call__ = twice


def run(model: str, every: int, arguments: Iterable[str]) -> tuple[int, str]:
    """Run `cortexmlx bench` in its own process. Return its exit code and its output."""
    done = subprocess.run(
        [sys.executable, "-c", COMMAND.format(every=every), "bench", model, *arguments],
        env={"OPENBLAS_NUM_THREADS": "1", **os.environ},  # else BLAS takes fewer threads on a busy machine
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode not in (0, SLOWER):
        raise SystemExit(f"a run ended with {done.returncode}: {done.stderr}")
    return done.returncode, done.stdout


def compare(model: str, saved: Path, every: int) -> Outcome:
    """Make one more run and compare it with the saved one."""
    code, printed = run(model, every, [*ARGUMENTS, "--compare", str(saved), "-o", "json"])
    records = json.loads(printed)["compare"]
    names = [f"{record['figure'].split(',')[0]} {record['clock']}" for record in records]
    changes = {name: record["change"] for name, record in zip(names, records, strict=True)}
    return Outcome(every, code, changes, {n: record["verdict"] for n, record in zip(names, records, strict=True)})


def table(found: Iterable[Outcome]) -> str:
    """Return how many runs of each kind were called slower, and their median changes."""
    outcomes = list(found)
    names = list(outcomes[0].changes)
    head = ["MLP twice", "runs", "called slower", *(f"{name}, %" for name in names)]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for every in dict.fromkeys(outcome.every for outcome in outcomes):
        chosen = [outcome for outcome in outcomes if outcome.every == every]
        what = {0: "of none", 2: "every 2nd"}.get(every, f"every {every}th")
        changes = [f"{100 * median(outcome.changes[name] for outcome in chosen):+.1f}" for name in names]
        called = sum(outcome.code == SLOWER for outcome in chosen)
        lines.append(f"| {' | '.join([what, str(len(chosen)), str(called), *changes])} |")
    return "\n".join(lines)


def main() -> None:
    """Save a run, compare many with it, and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m cortexmlx.bench.studies.regression_detection", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("model", nargs="?", default="smollm2", help="a llama")
    parser.add_argument("--runs", type=int, default=10, help="of each kind (default 10)")
    parser.add_argument("--log", type=Path, help="a file to which outcomes are added; those in it are not run again")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="cortexmlx-noticed-") as folder:
        saved = (asked.log.parent if asked.log else Path(folder)) / "noticed.json"
        done = [Outcome(**json.loads(line)) for line in asked.log.read_text().splitlines()] if _is(asked.log) else []
        if not saved.exists():
            run(asked.model, 0, [*ARGUMENTS, "--save", str(saved)])
        for number in range(asked.runs):  # the kinds take turns
            for every in EVERY:
                if sum(outcome.every == every for outcome in done) <= number:
                    done.append(compare(asked.model, saved, every))
                    if asked.log:
                        with asked.log.open("a") as log:
                            print(json.dumps(asdict(done[-1])), file=log, flush=True)
    print(table(done))


def _is(path: Path | None) -> bool:
    return path is not None and path.exists()


if __name__ == "__main__":
    main()
