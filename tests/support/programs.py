"""Programs of a user, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support.patience import PATIENCE

HEAD = f"""
import sys
PATIENCE = {PATIENCE}
from cortexmlx import Engine, SamplingParams
engine = lambda name=sys.argv[1]: Engine(name, kv_memory="256KB", block_size=8, max_rows=4)
"""


def start(program: str, model: Path) -> subprocess.Popen[str]:
    """Run `program` after HEAD."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    return subprocess.Popen(
        [sys.executable, "-c", HEAD + program, str(model)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def outcome(program: str, model: Path) -> tuple[int, str, str]:
    """Exit code, output and errors of a program that ends."""
    process = start(program, model)
    output, errors = ended(process)
    return process.returncode, output, errors


def ended(process: subprocess.Popen[str]) -> tuple[str, str]:
    """What a program still prints, to output and to errors, until it ends. One that does not in time is killed: it
    would take a core from all that is tested after it.
    """
    try:
        return process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
