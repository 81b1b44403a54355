"""`python -m cortexmlx.metal.lab.sim.judge`: run the known-good kernels and print how well they agree.

With `--coverage` each kernel runs in a build that counts and watches nothing. A second table says which of its lines
and branches ran.
"""

import argparse
import sys

from cortexmlx.metal.lab.sim.judge.cases import Case, Skipped, judge
from cortexmlx.metal.lab.sim.judge.coverage import Coverage
from cortexmlx.metal.lab.sim.judge.table import FAMILIES, all_cases


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cortexmlx.metal.lab.sim.judge", description=__doc__)
    parser.add_argument("--only", action="append", choices=list(FAMILIES), help="this family (may be repeated)")
    parser.add_argument("--fast", action="store_true", help="without watching every access")
    parser.add_argument("--coverage", action="store_true", help="say which lines and branches ran")
    parser.add_argument("--missed", action="store_true", help="with --coverage: list the lines that did not")
    parser.add_argument("--mlx-vlm", metavar="WHEEL", help="a wheel of mlx-vlm, or the folder that holds its package")
    parser.add_argument("words", nargs="*", help="only kernels whose group or name contains one of these")
    return parser


def main() -> int:
    """Print one line per kernel; return exit status 1 if a kernel disagrees."""
    options = _parser().parse_args()
    if options.mlx_vlm:
        sys.path.insert(0, options.mlx_vlm)
    wrong = judged = 0
    notes: set[str] = set()
    coverage = Coverage()
    for case in all_cases(tuple(options.only or FAMILIES)):
        label = f"{case.group}: {case.name}"
        if options.words and not any(word in label for word in options.words):
            continue
        if isinstance(case, Skipped):
            print(f"{label:<72} not run: {case.reason}")
            continue
        judged += 1
        wrong += not _judge(case, options, coverage)
        notes |= {case.note} - {""}
    for note in sorted(notes):
        print(f"* {note}")
    print(f"{judged - wrong} of {judged} agree")
    if options.coverage:
        print("\n" + coverage.table(options.missed))
    return 1 if wrong else 0


def _judge(case: Case, options: argparse.Namespace, coverage: Coverage) -> bool:
    """Run one case and print its line; return whether it agrees."""
    verdict = judge(case, checked=not options.fast, coverage=options.coverage)
    coverage.add(verdict.libraries if options.coverage else ())
    outcome = ("agrees" + "*" * bool(case.note)) if verdict.agrees else "DISAGREES"
    label = f"{case.group}: {case.name}"
    print(
        f"{label:<72} {outcome:<10} {verdict.error:9.1e} of {case.tolerance:.0e}  {verdict.seconds:6.2f} s", flush=True
    )
    if verdict.problem:
        print("    " + verdict.problem.replace("\n", "\n    "))
    return verdict.agrees


if __name__ == "__main__":
    sys.exit(main())
