"""Compare engines that speculate with one that does not, at length.

    python -m tests.trials.speculation [--answers N] [--seed S]

Prints what was compared, after every hundred trials and at the end. A trial that fails is printed with its seed, and
the others go on. Exit status 1 if one has failed.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as pytest does


def main() -> int:
    from cortexmlx.cpu import blas

    blas.preload()
    from support.speculation.at_length import run_at_length
    from support.speculation.kinds import NAMES, PLAIN, kinds
    from support.speculation.trial import Trial

    names = (*NAMES, *PLAIN)
    return run_at_length(__doc__, 20_000, names, kinds, lambda seed, kind, store: Trial(seed, kind, store=store))


if __name__ == "__main__":
    sys.exit(main())
