"""A program that sets up no logging reads nothing that it did not print itself: not of downloads, not of warnings."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support.models.hub import serving
from support.models.tiny import write_tiny
from support.patience import PATIENCE

PROGRAM = """
import sys, threading
from cortexmlx import CortexError, Engine, SamplingParams
seen = []
with Engine(f"org/{name}", kv_memory="256KB", on_progress=seen.append) as engine:
    told = threading.Event()
    def fail(event):
        told.set()
        raise ValueError("a listener that fails is logged")
    engine.submit("abc", SamplingParams(max_tokens=3), on_event=fail).result()
    told.wait()
    engine._worker.core.runner.dispatch = None
    for prompt in ("a step that fails is logged", [{"role": ""}], "x" * 10000):
        try:
            engine.generate(prompt)
        except CortexError:
            continue
        sys.exit("nothing failed")
try:
    Engine("org/half")
except CortexError:
    pass
else:
    sys.exit("half a model was loaded")
fractions = [p.fraction for p in seen if p.what == "downloading"]
if not (fractions and max(fractions) == 1.0 and min(fractions) >= 0.0):
    sys.exit(f"progress was {seen}")
"""


WINDOWLESS = """
import pathlib, sys, threading, traceback
sys.stdin = sys.stdout = sys.stderr = None
def run():
    try:
        exec(program, {"__name__": "app", "name": "other"})
    except BaseException as error:
        pathlib.Path(sys.argv[1]).write_text("".join(traceback.format_exception(error)))
    else:
        pathlib.Path(sys.argv[1]).write_text("done")
thread = threading.Thread(target=run)
thread.start()
thread.join()
"""
"""An app that was started without a terminal, as from the Finder, and uses the library on a thread of its own."""


def run(program: str, tmp_path: Path) -> tuple[str, str, int]:
    """What it prints, to output and errors, and how it ends. Of `org/half` the hub lists the files, but has none: it
    says so when it is asked again, and first that it is busy.
    """
    quiet = {"HF_HUB_VERBOSITY", "TRANSFORMERS_VERBOSITY", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_HUB_OFFLINE"}
    environment = {name: value for name, value in os.environ.items() if name not in quiet}
    folder = write_tiny(tmp_path / "tiny")
    with serving(tiny=folder, other=folder, half=folder) as hub:
        hub.refuse["/org/half/resolve/"] = [503, 404, 503, 404]
        environment |= {
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path / "home"),
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        }
        command = [sys.executable, "-c", program, str(tmp_path / "outcome")]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=PATIENCE)
    return done.stdout, done.stderr, done.returncode


def test_neither_a_download_nor_a_failure_prints_anything(tmp_path: Path) -> None:
    """Nor on another thread of an app without standard streams."""
    first = "program = {!r}\nexec(program, {{'__name__': 'app', 'name': 'tiny'}})\n"
    assert run(first.format(PROGRAM) + WINDOWLESS, tmp_path) == ("", "", 0)
    assert (tmp_path / "outcome").read_text() == "done"
