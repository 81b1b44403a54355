"""`cortexmlx embed` on a real engine: the vectors are the engine's, and a run that is killed goes on where it was."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cortexmlx import Engine
from cortexmlx.cli.start import run
from support.embedding.models import write_embedding
from support.patience import PATIENCE

KILLED = """
import os, signal, sys
from cortexmlx.cli import main
from cortexmlx.cli.embed import files, run
run.MAX_CHUNK_TEXTS = 8
left = int(sys.argv.pop(1))
append = files.EmbedFiles.append
def counted(self, rows):
    global left
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
    left -= 1
    append(self, rows)
files.EmbedFiles.append = counted
main()
"""
"""The command, which is killed before so many chunks and one are written."""
COUNT = 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_embedding(tmp_path_factory.mktemp("models") / "embedder")


@pytest.fixture(scope="module")
def vectors(model: Path) -> np.ndarray:
    with Engine(str(model), kv_memory="8MB") as engine:
        return engine.embed([f"text {number}" for number in range(COUNT)], prompt="query").vectors


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "in.txt"
    path.write_text("".join(f"text {number}\n" for number in range(COUNT)))
    yield path


def found(path: Path) -> np.ndarray:
    if path.suffix == ".npy":
        return np.load(path)
    return np.array([json.loads(line)["embedding"] for line in path.read_text().splitlines()], np.float32)


@pytest.mark.parametrize("form", ["npy", pytest.param("jsonl", marks=pytest.mark.slow)])
def test_a_run_that_is_killed_goes_on_where_it_was(
    model: Path, vectors: np.ndarray, source: Path, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = source.with_name(f"out.{form}")
    options = [str(model), str(source), "--prompt", "query", "--kv-memory", "8MB", "-o", str(out)]
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, "2", "embed", *options], capture_output=True, timeout=PATIENCE
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert run(["embed", *options, "--resume"]) == 0
    said = capsys.readouterr().err
    assert "16 were there already" in said and "24 embedded, 0 failed" in said
    assert np.allclose(found(out), vectors, atol=1e-5)


@pytest.mark.slow
def test_texts_come_through_a_pipe_and_records_leave_as_they_are_ready(model: Path, vectors: np.ndarray) -> None:
    command = [sys.executable, "-m", "cortexmlx", "embed", str(model), "-", "--prompt", "query", "--kv-memory", "8MB"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        for number in range(3):
            process.stdin.write(f"text {number}\n".encode())
            process.stdin.flush()
            record = json.loads(process.stdout.readline())
            assert np.allclose(np.array(record["embedding"], np.float32), vectors[number], atol=1e-5)
        process.stdin.close()
        assert process.wait(PATIENCE) == 0
