"""Random trials until enough answers were compared, for the programs that do it at length."""

from __future__ import annotations

import argparse
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from support.speculation.counts import Counts
from support.speculation.trial import Trial

K = TypeVar("K")


def run_at_length(
    description: str | None,
    answers: int,
    names: Sequence[str],
    kinds: Callable[[Path], Callable[[str], K]],
    trial: Callable[[int, K, Path], Trial],
) -> int:
    """Read the command line, run a trial of each kind of model in turn, and print what was compared, after every
    hundred trials and at the end. A trial that fails is printed with its seed, and the others go on. Return the exit
    status.

    answers: how many are compared if the command line does not say it.
    kinds: makes models in a folder, by name.
    trial: makes a trial of a seed, a kind of model and a folder for the disk tier.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=answers)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    counts, failed, seed, began = Counts(), 0, options.seed, time.perf_counter()
    with tempfile.TemporaryDirectory() as root:
        kind = kinds(Path(root))
        while counts.answers < options.answers:
            with tempfile.TemporaryDirectory() as store:
                name = names[seed % len(names)]
                try:
                    trial(seed, kind(name), Path(store)).run(counts)
                except Exception:
                    failed += 1
                    print(f"FAILED: seed {seed}, {name}\n{traceback.format_exc()}", flush=True)
            seed += 1
            if seed % 100 == 0:
                print(f"{time.perf_counter() - began:.0f} s, {failed} failed\n{counts}\n", flush=True)
    print(f"{time.perf_counter() - began:.0f} s, {failed} failed\n{counts}")
    return 1 if failed else 0
