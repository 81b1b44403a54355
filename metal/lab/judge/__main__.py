"""`python -m cortexmlx.metal.lab.judge`: run the known-good kernels and print how well they agree."""

import argparse
import sys

from cortexmlx.metal.lab.judge.cases import KernelCase, Skipped, judge
from cortexmlx.metal.lab.judge.table import FAMILIES, all_cases


def main() -> int:
    """Print one line per kernel; return exit status 1 if a kernel disagrees."""
    parser = argparse.ArgumentParser(prog="python -m cortexmlx.metal.lab.judge", description=__doc__)
    parser.add_argument("--only", action="append", choices=list(FAMILIES), help="this family (may be repeated)")
    parser.add_argument("--fast", action="store_true", help="without watching every access")
    parser.add_argument("words", nargs="*", help="only kernels whose group or name contains one of these")
    options = parser.parse_args()
    wrong = judged = 0
    notes: set[str] = set()
    for case in all_cases(tuple(options.only or FAMILIES)):
        if options.words and not any(word in case.label for word in options.words):
            continue
        if isinstance(case, Skipped):
            print(f"{case.label:<72} not run: {case.reason}")
            continue
        judged += 1
        wrong += not _run(case, checked=not options.fast)
        notes |= {case.note} - {""}
    for note in sorted(notes):
        print(f"* {note}")
    print(f"{judged - wrong} of {judged} agree")
    return 1 if wrong else 0


def _run(case: KernelCase, checked: bool) -> bool:
    """Run one case and print its line; return whether it agrees."""
    verdict = judge(case, checked)
    outcome = ("agrees" + "*" * bool(case.note)) if verdict.agrees else "DISAGREES"
    print(
        f"{case.label:<72} {outcome:<10} {verdict.error:9.1e} of {case.tolerance:.0e}  {verdict.seconds:6.2f} s",
        flush=True,
    )
    if verdict.problem:
        print("    " + verdict.problem.replace("\n", "\n    "))
    return verdict.agrees


if __name__ == "__main__":
    sys.exit(main())
