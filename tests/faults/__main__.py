"""Plant each fault in a copy of the tree, run the fast tests of its list on it, and print what they said.

    python -m tests.faults [--list NAME] [--only TEXT] [--seeds N] [--check]

A list is a file of this folder: a module with `FAULTS` and the `TESTS` that judge them, or a JSON file of more faults
of the kernels. `--only` takes the faults whose name contains TEXT. With `--seeds` the first test that notices a fault
runs under N seeds of the simulator's scheduler and must notice it under each. `--check` plants nothing and runs
nothing: it names the faults whose text is not in its file once, those that any test would notice, since they name what
is not there, and the tests that do not exist. Exit status 1 if a fault was missed or cannot be planted.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.faults import planted
from tests.faults.planted import Fault

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
LIMIT = 1200
"""Seconds for the tests with one fault. What takes longer is neither caught nor missed, and is said to be so."""


@dataclass(frozen=True)
class FaultList:
    """Faults that the same tests judge, in order: files of `tests/`."""

    name: str
    faults: Sequence[Fault]
    tests: Sequence[str]


def fault_lists() -> list[FaultList]:
    """Return every list of this folder."""
    lists = []
    for path in sorted(HERE.glob("*.py")):
        module = importlib.import_module(f"tests.faults.{path.stem}") if not path.stem.startswith("__") else None
        if hasattr(module, "FAULTS"):
            lists.append(FaultList(path.stem, module.FAULTS, module.TESTS))
    for path in sorted(HERE.glob("*.json")):
        lists.append(FaultList(path.stem, [Fault(**e) for e in json.loads(path.read_text())], planted.TESTS))
    return lists


def unusable(lists: Sequence[FaultList]) -> Iterator[str]:
    """Yield a line for each fault that cannot be planted, and for each test file that is not there."""
    texts: list[tuple[str, str]] = []
    for each in lists:
        for fault in each.faults:
            path = ROOT / fault.file
            text = path.read_text() if path.is_file() else ""
            if (count := text.count(fault.old)) != 1:
                yield f"{each.name}: {fault.name!r}: {fault.file} has {count} times, not once, {fault.old!r}"
            elif path.suffix == ".py":
                planted_text = text.replace(fault.old, fault.new)
                texts.append((f"{each.name}: {fault.name!r}", planted_text))
                for name in set(re.findall(r"\bself\.(\w+)", planted_text)) - set(re.findall(r"\w+", text)):
                    yield f"{each.name}: {fault.name!r}: {fault.file} has no self.{name}"
        for test in each.tests:
            if not (ROOT / "tests" / test).exists():
                yield f"{each.name}: tests/{test} is not there"
    with tempfile.TemporaryDirectory() as folder:
        for number, (_, text) in enumerate(texts):
            Path(folder, f"{number}.py").write_text(text)
        command = ["-m", "ruff", "check", "--isolated", "--select=F821,E9", "--output-format=json", folder]
        done = run(ROOT, *command)
        if not done.stdout:
            yield f"ruff did not look at them: {done.stderr.strip()}"
        for found in json.loads(done.stdout or "[]"):
            yield f"{texts[int(Path(found['filename']).stem)][0]}: {found['message']}"


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python on the copy in the folder."""
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT)


def first_failure(folder: Path, tests: Sequence[str]) -> tuple[str, str] | None:
    """Run the tests up to the first that fails; return its pytest address and what it says, or None if all pass."""
    command = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow and not metal and not cuda"]
    done = run(folder, *command, *(f"tests/{name}" for name in tests))
    if done.returncode == 0:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (tests/\S+?::(?:\S+?\[.*?\]|\S+)|tests/\S+)(?: - |$)", done.stdout, re.M)
    if failed is None:
        return "", f"pytest ended with {done.returncode}: {done.stdout[-300:]}{done.stderr[-300:]}"
    error = re.search(r"^E +(.+)", done.stdout, re.M)
    return failed.group(1), error.group(1)[:120] if error else ""


def judge(folder: Path, fault: Fault, tests: Sequence[str], seeds: int, first: list[str]) -> tuple[str, str]:
    """Plant the fault in the copy, and return a word and what the tests said. The test files in `first`, which caught
    other faults of the same file, run before the others; a further one is added to them.
    """
    path = folder / fault.file
    text = path.read_text()
    path.write_text(text.replace(fault.old, fault.new))
    try:
        failure = first_failure(folder, first) if first else None
        failure = failure or first_failure(folder, tests)
        if failure is None:
            return "MISSED", ""
        test, error = failure
        if (name := test.partition("::")[0].removeprefix("tests/")) and name not in first:
            first.append(name)
        said = f"{test.split('::')[-1]}: {error}"
        if not test or not seeds:
            return "caught" if test else "BROKEN", said
        noticed = int(run(folder, "-m", "tests.faults.seeds", test, str(seeds)).stdout)
        return "caught" if noticed == seeds else "LUCK", f"{said} ({noticed} of {seeds} seeds)"
    except subprocess.TimeoutExpired:
        return "TIME", f"no end within {LIMIT} s"
    finally:
        path.write_text(text)


def main() -> int:
    lists = fault_lists()
    parser = argparse.ArgumentParser(prog="python -m tests.faults")
    parser.add_argument("--list", choices=[each.name for each in lists])
    parser.add_argument("--only", default="")
    parser.add_argument("--seeds", type=int, default=0)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if options.list is not None:
        lists = [each for each in lists if each.name == options.list]
    lists = [FaultList(of.name, [f for f in of.faults if options.only in f.name], of.tests) for of in lists]
    lists = [each for each in lists if each.faults]
    faults = [(fault, each.tests) for each in lists for fault in each.faults]
    if problems := list(unusable(lists)):
        print("\n".join(problems))
        return 1
    if options.check:
        print(f"{len(faults)} faults can be planted")
        return 0
    missed = 0
    first: defaultdict[tuple[str, Sequence[str]], list[str]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "tree")
        shutil.copytree(ROOT, folder, symlinks=True, ignore=shutil.ignore_patterns(".*", "__pycache__", "build"))
        for tests in dict.fromkeys(tuple(tests) for _, tests in faults):
            if failure := first_failure(folder, tests):
                print(f"without any fault the tests fail already: {': '.join(failure)}")
                return 1
        for fault, tests in faults:
            word, said = judge(folder, fault, tests, options.seeds, first[fault.file, tests])
            missed += word != "caught"
            print(f"{word:<8}{fault.name:<72}{fault.file:<24}{said}", flush=True)
    print(f"{len(faults) - missed} of {len(faults)} caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
