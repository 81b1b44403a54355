"""Check model types against mlx-lm, and keep what was found.

    python -m tests.architectures [TYPE ...] [--write]

Without types, every one that the installed mlx-lm has: some minutes. A type without numbers in `configurations.json`,
which a newer mlx-lm brought, is tried with those that all share. Prints a line for each, with the largest difference of
a logit in a batch, tokens taken from the prefix cache, prompts whose two answers differ, and preemptions. `--write`
keeps the outcomes in `results.json`, those of the given types beside the old ones, and makes `docs/models.md` of them.
Exit status 1 if a type is served wrongly, which is never written, or without `--write` found otherwise than before.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))


def main() -> int:
    from cortexmlx.cpu import blas

    blas.preload()
    from cortexmlx.mlx_lm.package import enter_mlx_lm

    enter_mlx_lm()
    from mlx_lm._version import __version__ as version

    from tests.architectures.configurations import TYPES, modules
    from tests.architectures.outcomes import RESULTS, Status, outcome, read_results, write_results
    from tests.architectures.page import PAGE, page

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", metavar="TYPE")
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    kept = read_results() if RESULTS.exists() else {}
    wrong, new = [], 0
    installed, _ = modules()
    if gone := sorted({*TYPES} - {*installed}):
        print(f"mlx-lm {version} no longer has {', '.join(gone)}")
    for name in asked.types or sorted(installed):
        figures: list[str] = []
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            found = outcome(name, Path(folder) / "model", figures.append)
        what = "; ".join([found.why] if found.why else figures)
        seconds = time.perf_counter() - started
        mark = "" if found == kept.get(name) else "  (new)" if name in TYPES else "  (a type that we did not know)"
        print(f"{name}: {found.status.value}: {what} [{seconds:.1f} s]{mark}", flush=True)
        new += bool(mark)
        if found.status is Status.WRONG:
            wrong.append(name)
        elif asked.write and name in TYPES:
            kept[name] = found
            write_results({each: kept[each] for each in TYPES if each in kept})
            PAGE.write_text(page(read_results(), version))
    if wrong:
        print(f"served wrongly: {', '.join(wrong)}")
    return 1 if wrong or (new and not asked.write) else 0


if __name__ == "__main__":
    sys.exit(main())
