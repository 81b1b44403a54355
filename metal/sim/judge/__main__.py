"""`python -m cortexmlx.metal.sim.judge [--fast] [words]`: run the known-good kernels and print how well they agree."""

import argparse
import sys

from .cases import Skipped, judge
from .table import all_cases


def main() -> int:
    """Print one line a kernel; the exit status is 1 if one disagrees."""
    parser = argparse.ArgumentParser(prog="python -m cortexmlx.metal.sim.judge", description=__doc__)
    parser.add_argument("--fast", action="store_true", help="without watching every access")
    parser.add_argument("words", nargs="*", help="only kernels whose group or name contains one of these")
    options = parser.parse_args()
    wrong = judged = 0
    notes: set[str] = set()
    for case in all_cases():
        label = f"{case.group}: {case.name}"
        if options.words and not any(word in label for word in options.words):
            continue
        if isinstance(case, Skipped):
            print(f"{label:<72} not run: {case.reason}")
            continue
        verdict = judge(case, checked=not options.fast)
        judged += 1
        wrong += not verdict.agrees
        outcome = ("agrees" + "*" * bool(case.unordered)) if verdict.agrees else "DISAGREES"
        print(
            f"{label:<72} {outcome:<10} {verdict.error:9.1e} of {case.tolerance:.0e}  {verdict.seconds:6.2f} s",
            flush=True,
        )
        notes |= {case.unordered} - {""}
        if verdict.problem:
            print("    " + verdict.problem.replace("\n", "\n    "))
    for note in sorted(notes):
        print(f"* {note}")
    print(f"{judged - wrong} of {judged} agree")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
