"""Check model types against mlx-lm, and keep what was found.

    python -m tests.architectures [TYPE ...] [--write]

Without types, every one that mlx-lm has: some minutes. Prints a line for each, with the largest difference of a logit
in a batch, tokens taken from the prefix cache and preemptions. `--write` keeps the outcomes in `results.json`, those of
the given types beside the old ones, and makes `docs/models.md` of them. Exit status 1 if a type is served wrongly (then
nothing is written), or was found otherwise than `results.json` says without `--write`.
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
    from cortexmlx.host.package import enter_mlx_lm

    enter_mlx_lm()
    from mlx_lm._version import __version__ as version

    from tests.architectures.configurations import TYPES
    from tests.architectures.outcomes import RESULTS, Status, outcome, read_results, write_results
    from tests.architectures.page import PAGE, page

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", metavar="TYPE")
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    before = read_results() if RESULTS.exists() else {}
    found = {}
    for name in asked.types or TYPES:
        figures: list[str] = []
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            found[name] = outcome(name, Path(folder) / "model", figures.append)
        one = found[name]
        new = "" if one == before.get(name) else "  (new)"
        what = "; ".join([one.why] if one.why else figures)
        print(f"{name}: {one.status.value}: {what} [{time.perf_counter() - started:.1f} s]{new}", flush=True)
    wrong = [name for name, one in found.items() if one.status is Status.WRONG]
    if wrong:
        print(f"served wrongly: {', '.join(wrong)}")
        return 1
    if asked.write:
        every = before | found
        kept = {name: every[name] for name in TYPES if name in every}
        write_results(kept)
        PAGE.write_text(page(kept, version))
        return 0
    return 0 if all(before.get(name) == one for name, one in found.items()) else 1


if __name__ == "__main__":
    sys.exit(main())
