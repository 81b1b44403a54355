"""Refuse memory, and raise a plain exception, at every allocation of every change of memory.

    python -m tests.trials.refusals [--every N] [--only KIND]...

For each kind of model, one day of an engine is lived once to count its allocations: the arena grows, shrinks, moves
blocks; prompts share beginnings and fork; states are kept; adapters, a draft model and a store come and go. Then the
same day is lived once for each allocation, each error, and once or four times in a row there: so a rollback fails, too.
Every answer must be right, cut short or failed for memory; where one allocation is refused, all must be right. Later
answers must be right, nothing may be written outside of the arena, and no pass may see layers of different sizes.

Prints what was compared by kind, and each day that fails. Exit status 1 if one has failed. Days are lived in one
process: an abort ends it, and so does a hang, with the stacks of all threads.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as pytest does


def main() -> int:
    from cortexmlx.cpu import blas

    blas.preload()
    from support.engine.planted import ERRORS, KINDS, Day, Plan, kind_of
    from support.patience import PATIENCE

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, help="of so many allocations, only one")
    parser.add_argument("--only", action="append", choices=KINDS, metavar="KIND", help=f"of {', '.join(KINDS)}")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    failed, runs, began = 0, 0, time.perf_counter()
    places: set[str] = set()
    outcomes: Counter[str] = Counter()
    for name in options.only or KINDS:
        with tempfile.TemporaryDirectory() as root:
            kind = kind_of(name, Path(root))

            def live(plan: Plan, kind=kind) -> Counter[str]:  # type: ignore[no-untyped-def]
                with tempfile.TemporaryDirectory() as store:
                    return Day(kind, plan, Path(store) if kind.store else None).run()

            live(counted := Plan())
            places |= set(counted.sites)
            mine: Counter[str] = Counter()
            for at in range(0, len(counted.sites), options.every):
                for error in ERRORS:
                    for times in (1, 4):
                        runs += 1
                        faulthandler.dump_traceback_later(PATIENCE, exit=True)
                        try:
                            mine += live(plan := Plan(error, at, times))
                        except Exception:
                            failed += 1
                            where = plan.sites[at] if at < len(plan.sites) else "nowhere"
                            print(
                                f"FAILED: {name}, {error} x {times} at {at} ({where})\n{traceback.format_exc()}",
                                flush=True,
                            )
            outcomes += mine
            print(f"{name}: {len(counted.sites)} allocations, {dict(mine)}, {failed} failed so far", flush=True)
    faulthandler.cancel_dump_traceback_later()
    took = time.perf_counter() - began
    print(f"{took:.0f} s: {len(places)} places, {runs} runs, {dict(outcomes)}, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
