"""`cortexmlx batch` on a real engine, killed at any moment: with --resume each request is answered once, as if nothing
had happened.
"""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BATCH = [sys.executable, "-c", "from cortexmlx.cli import main; main()", "batch"]
KILLED = """
import os, signal, sys, threading
from cortexmlx.cli import main
from cortexmlx.cli.batch.files import RecordFile
left, delay = int(sys.argv.pop(1)), float(sys.argv.pop(1))
append = RecordFile.append
def counted(file, record):
    global left
    append(file, record)
    left -= 1
    if not left:
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
RecordFile.append = counted
main()
"""
"""The command, which ends without a word so many seconds after so many records."""
OPTIONS = ["--raw", "--max-tokens", "12", "--no-kv-store", "--kv-memory", "4MB", "--max-rows", "8"]


def write_requests(path: Path, count: int) -> None:
    """Requests of every style, long and short, and lines that are none."""
    chance = random.Random(7)
    lines = []
    for i in range(count):
        text = f"request {i} " * chance.randint(1, 6)
        body = {"prompt": text, "max_tokens": chance.randint(1, 30)}
        line: Any = {"id": f"r{i}", **body}
        if i % 5 == 1:
            line = {"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": body}
        elif i % 50 == 2:
            line = {"id": f"r{i}", "prompt": text, "no_such_field": 1}
        lines.append("{oops" if i % 50 == 3 else json.dumps(line))
    path.write_text("\n".join(lines))


def without_moment(path: Path) -> bytes:
    """The file, but for the moment at which its run began."""
    return re.sub(rb'"created": \d+', b'"created": 0', path.read_bytes())


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_ends_with_the_same_bytes(tiny: Any, tmp_path: Path) -> None:
    count, kills = 500, 10
    source, whole, out = (tmp_path / name for name in ("in.jsonl", "whole.jsonl", "out.jsonl"))
    write_requests(source, count)
    command = [*BATCH, str(tiny("llama")), str(source), *OPTIONS, "-o"]
    uninterrupted = subprocess.run([*command, str(whole)], capture_output=True)
    assert uninterrupted.returncode == 1, uninterrupted.stderr
    chance = random.Random(kills)
    held = 0
    for left in range(kills, 0, -1):
        more, delay = chance.randint(1, (count - held) // (left + 1)), chance.uniform(0.0, 0.02)
        killed = [*BATCH[:2], KILLED, str(more), str(delay), *command[3:], str(out), "--resume"]
        assert subprocess.run(killed, stderr=subprocess.DEVNULL).returncode == -signal.SIGKILL
        finished = out.read_bytes().count(b"\n")
        assert finished >= held + more, "what had finished is there"
        held = finished
    last = subprocess.run([*command, str(out), "--resume"], capture_output=True)
    assert last.returncode == 1 and f"{held} were there already".encode() in last.stderr, last.stderr
    records = [json.loads(line) for line in out.read_bytes().splitlines()]
    lines = [None if i % 50 == 3 else f"r{i}" for i in range(count)]
    assert [record.get("custom_id", record["id"]) for record in records] == lines
    assert without_moment(out) == without_moment(whole)
    simple = [i for i, record in enumerate(records) if "text" in record]
    assert len(simple) > count // 2
    one, other = (path.read_bytes().splitlines() for path in (out, whole))
    assert [one[i] for i in simple] == [other[i] for i in simple]
