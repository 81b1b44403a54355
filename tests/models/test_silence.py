"""A program that sets up no logging reads nothing that it did not print itself: not of downloads, not of warnings."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from support.tiny import write_tiny

COMMIT = "1" * 40

PROGRAM = """
import sys, threading
from cortexmlx import CortexError, Engine, SamplingParams
seen = []
with Engine("org/tiny", kv_memory="256KB", on_progress=seen.append) as engine:
    told = threading.Event()
    def fail(event):
        told.set()
        raise ValueError("a listener that fails is logged")
    engine.submit("abc", SamplingParams(max_tokens=3), on_event=fail).result()
    told.wait(10)
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


class Hub(http.server.BaseHTTPRequestHandler):
    """A model hub of one model, `org/tiny`. Of `org/half` it lists the same files, but has none: it says so when it is
    asked again, and first that it is busy.
    """

    folder: Path
    asked: ClassVar[set[str]] = set()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/"):
            files = [self.entry(file) for file in sorted(self.folder.iterdir())]
            listing = {"id": "org/tiny", "sha": COMMIT, "siblings": [{"rfilename": f["path"]} for f in files]}
            self.answer(json.dumps(files if "/tree/" in path else listing).encode(), {})
        elif path.startswith("/org/half/"):
            self.answer(b"", {}, 404 if path in self.asked else 503)
            self.asked.add(path)
        else:
            content = (self.folder / path.rpartition("/")[2]).read_bytes()
            self.answer(content, {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha1(content).hexdigest()}"'})

    do_HEAD = do_GET

    @staticmethod
    def entry(file: Path) -> dict[str, Any]:
        content = file.read_bytes()
        oid = hashlib.sha1(content).hexdigest()
        return {"type": "file", "path": file.name, "size": len(content), "oid": oid}

    def answer(self, content: bytes, headers: dict[str, str], status: int = 200) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        """Nothing on the test's output."""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[str]:
    Hub.asked.clear()
    Hub.folder = write_tiny(tmp_path / "tiny")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


WINDOWLESS = """
import pathlib, sys, threading, traceback
sys.stdin = sys.stdout = sys.stderr = None
def run():
    try:
        exec(program, {"__name__": "app"})
    except BaseException as error:
        pathlib.Path(sys.argv[1]).write_text("".join(traceback.format_exception(error)))
    else:
        pathlib.Path(sys.argv[1]).write_text("done")
thread = threading.Thread(target=run)
thread.start()
thread.join()
"""
"""An app that was started without a terminal, as from the Finder, and uses the library on a thread of its own."""


def run(program: str, hub: str, tmp_path: Path) -> tuple[str, str, int]:
    """What it prints, to output and errors, and how it ends."""
    quiet = {"HF_HUB_VERBOSITY", "TRANSFORMERS_VERBOSITY", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_HUB_OFFLINE"}
    environment = {name: value for name, value in os.environ.items() if name not in quiet}
    environment |= {
        "HF_ENDPOINT": hub,
        "HF_HOME": str(tmp_path / "home"),
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }
    command = [sys.executable, "-c", program, str(tmp_path / "outcome")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    return done.stdout, done.stderr, done.returncode


def test_neither_a_download_nor_a_failure_prints_anything(hub: str, tmp_path: Path) -> None:
    assert run(PROGRAM, hub, tmp_path) == ("", "", 0)


def test_an_app_without_standard_streams_does_the_same_on_another_thread(hub: str, tmp_path: Path) -> None:
    assert run(f"program = {PROGRAM!r}\n{WINDOWLESS}", hub, tmp_path) == ("", "", 0)
    assert (tmp_path / "outcome").read_text() == "done"
