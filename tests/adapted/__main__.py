"""Compare engines that serve several adapters in one batch with engines that have one each, at length.

    python -m tests.adapted [--answers N] [--seed S]

Prints what was compared, after every hundred trials and at the end. A trial that fails is printed with its seed, and
the others go on. Exit status 1 if one has failed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as pytest does


def main() -> int:
    from cortexmlx.cpu import blas

    blas.preload()
    from support.adapted.kinds import NAMES, adapted_kinds
    from support.adapted.trial import AdaptedTrial
    from support.speculation.counts import Counts

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=3_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    counts, failed, seed, began = Counts(), 0, options.seed, time.perf_counter()
    with tempfile.TemporaryDirectory() as root:
        kind = adapted_kinds(Path(root))
        while counts.answers < options.answers:
            with tempfile.TemporaryDirectory() as store:
                name = NAMES[seed % len(NAMES)]
                try:
                    AdaptedTrial(seed, kind(name), store=Path(store)).run(counts)
                except Exception:
                    failed += 1
                    print(f"FAILED: seed {seed}, {name}\n{traceback.format_exc()}", flush=True)
            seed += 1
            if seed % 100 == 0:
                print(f"{time.perf_counter() - began:.0f} s, {failed} failed\n{counts}\n", flush=True)
    print(f"{time.perf_counter() - began:.0f} s, {failed} failed\n{counts}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
