"""Compare engines that serve several adapters in one batch with engines that have one each, at length.

    python -m tests.trials.adapters [--answers N] [--seed S]

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
    from support.adapters.kinds import NAMES, adapted_kinds
    from support.adapters.trial import AdaptedTrial
    from support.speculation.at_length import run_at_length

    return run_at_length(
        __doc__, 3_000, NAMES, adapted_kinds, lambda seed, kind, store: AdaptedTrial(seed, kind, store=store)
    )


if __name__ == "__main__":
    sys.exit(main())
