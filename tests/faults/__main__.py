"""Plant each fault in a copy of the sources, run the fast tests of its part on it, and print
what they said.

    python -m tests.faults [--room ROOM] [--only TEXT] [--more FILE.json] [--seeds N]

`--room` takes the faults of a module of this folder that has judges of its own, such as `suffix`. `--only` takes the
faults whose name contains TEXT. `--more` adds faults from a JSON list of objects with name, file,
old and new. With `--seeds` the first test that notices a fault runs under N seeds of the simulator's scheduler and must
notice it under each. Exit status 1 if a fault was missed or could not be planted.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.faults import (
    adapters,
    choices,
    draft_model,
    embeddings,
    gains,
    identity,
    launches,
    links,
    lost_hosts,
    memory,
    own_arrays,
    parts,
    piece_edges,
    planted,
    products,
    remote_hosts,
    short_pieces,
    speculation,
    structured,
    suffix,
    tools,
    vectors,
    warm,
    worker_starts,
)
from tests.faults.planted import Fault

ROOT = Path(__file__).resolve().parents[2]
KERNELS = (*planted.FAULTS, *own_arrays.FAULTS)
ROOMS = (
    adapters,
    choices,
    draft_model,
    embeddings,
    gains,
    launches,
    lost_hosts,
    links,
    memory,
    parts,
    piece_edges,
    products,
    remote_hosts,
    short_pieces,
    speculation,
    structured,
    suffix,
    tools,
    vectors,
    warm,
    worker_starts,
)
"""The faults that have judges of their own, `TESTS`."""
TESTS = (
    "kv/test_step.py",
    "attention/test_alibi.py",
    "attention/test_softmax.py",
    "attention/test_reference_step.py",
    "attention/test_reference_quantized.py",
    "metal/test_work.py",
    "metal/test_rules.py",
    "metal/test_matrix.py",
    "metal/test_sources.py",
    "metal/test_kernels.py",
    "metal/test_decode.py",
    "metal/test_decode_tokens.py",
    "metal/test_wide.py",
    "metal/test_decode_wide.py",
    "metal/test_decode_alibi.py",
    "metal/test_decode_quantized.py",
    "metal/test_decode_blocks.py",
    "metal/test_reduce.py",
    "metal/test_prefill.py",
    "attention/test_metal.py",
    "attention/test_metal_prefill.py",
    "disk/test_kept_hashes.py",
    "disk/test_file_hash.py",
    "models/test_weights_hash.py",
    "execution/test_fingerprint.py",
    "disk/test_setup.py",
    "kv/test_disk_tier.py",
)


LIMIT = 1200
"""Seconds for the tests with one fault. What takes longer is neither caught nor missed, and is said to be so."""


def copy_sources(folder: Path) -> None:
    """The package as it installs, so that the copy is what gets imported, and the tests that judge it."""
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "cortexmlx", folder / "cortexmlx", ignore=ignore)
    for part in ("metal", "cli", "bench"):
        shutil.copytree(ROOT / part, folder / "cortexmlx" / part, ignore=ignore)
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", folder)


def place(folder: Path, file: str) -> Path:
    """Where a file of the repository lies in the copy."""
    return folder / (file if file.startswith("cortexmlx/") else f"cortexmlx/{file}")


def judge(folder: Path, fault: Fault | None, tests: Sequence[str], seeds: int = 0) -> tuple[str, int]:
    """The first of the tests that fails with the fault planted and what it says, or "" if all pass; and under how many
    of the seeds it fails.
    """
    if fault is not None:
        path = place(folder, fault.file)
        text = path.read_text()
        if text.count(fault.old) != 1:
            raise ValueError(f"{fault.name}: {fault.file} has {text.count(fault.old)} times {fault.old!r}, not once")
        path.write_text(text.replace(fault.old, fault.new))
    try:
        command = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow and not metal"]
        done = run(folder, *command, *(f"tests/{name}" for name in tests))
        if done.returncode == 0:
            return "", 0
        failed = re.search(r"^(?:FAILED|ERROR) (tests/\S+?::(?:\S+?\[.*?\]|\S+))(?: - |$)", done.stdout, re.M)
        if failed is None:
            return f"pytest ended with {done.returncode}: {done.stdout[-300:]}", 0
        test, said = failed.group(1), re.search(r"^E +(.+)", done.stdout, re.M)
        under = int(run(folder, "-m", "tests.faults.seeds", test, str(seeds)).stdout) if seeds else 0
        return f"{test.split('::')[-1]}: {said.group(1)[:120] if said else ''}", under
    finally:
        if fault is not None:
            path.write_text(text)


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python on the copy in the folder."""
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults")
    names = {room.__name__.rpartition(".")[2]: room for room in ROOMS}
    parser.add_argument("--room", choices=names)
    parser.add_argument("--only", default="")
    parser.add_argument("--more", type=Path)
    parser.add_argument("--seeds", type=int, default=0)
    options = parser.parse_args()
    more = [Fault(**entry) for entry in json.loads(options.more.read_text())] if options.more else []
    rooms = [(TESTS, (*KERNELS, *identity.FAULTS, *more)), *((room.TESTS, room.FAULTS) for room in ROOMS)]
    if options.room is not None:
        rooms = [(names[options.room].TESTS, names[options.room].FAULTS)]
    faults = [(fault, tests) for tests, every in rooms for fault in every if options.only in fault.name]
    missed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_sources(folder)
        for tests in dict.fromkeys(tests for _, tests in faults):
            broken, _ = judge(folder, None, tests)
            if broken:
                print(f"without any fault the tests fail already: {broken}")
                return 1
        for fault, tests in faults:
            try:
                caught, under = judge(folder, fault, tests, options.seeds)
            except subprocess.TimeoutExpired:
                missed += 1
                print(f"{'TIME':<8}{fault.name:<72}{fault.file:<24}no end within {LIMIT} s", flush=True)
                continue
            noticed = bool(caught) and under == options.seeds
            missed += not noticed
            word = "caught" if noticed else "LUCK" if caught else "MISSED"
            seeds = f" ({under} of {options.seeds} seeds)" if options.seeds else ""
            print(f"{word:<8}{fault.name:<72}{fault.file:<24}{caught}{seeds}", flush=True)
    print(f"{len(faults) - missed} of {len(faults)} caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
