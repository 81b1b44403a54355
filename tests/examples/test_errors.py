"""What goes wrong in an example is one line, as in the program itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.examples import EXAMPLES
from support.patience import PATIENCE


def test_an_example_ends_without_a_traceback(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "tools" / "notes.py"), "no/such/model", "what?"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=PATIENCE,
        env={"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(EXAMPLES.parent), "HOME": str(tmp_path)},
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.startswith("error: ")
