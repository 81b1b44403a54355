"""Opening an engine for a command: closed after it, and a progress bar only where a person looks."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cortexmlx.cli.engine import open_engine
from cortexmlx.errors import EngineClosed
from cortexmlx.serving.config import EngineConfig
from support.tiny import write_tiny


def test_an_engine_is_there_for_a_command_and_closed_after_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_tiny(tmp_path / "tiny")
    with open_engine(EngineConfig(folder, kv_memory=2**20, max_rows=3, block_size=8)) as engine:
        stats = engine.stats()
        assert (engine.info.path, stats.max_rows, stats.block_size) == (str(folder), 3, 8)
    with pytest.raises(EngineClosed):
        engine.generate("a")
    assert capsys.readouterr() == ("", "")


def test_an_interrupt_does_not_wait_until_the_model_is_loaded(tmp_path: Path) -> None:
    code = (
        "import signal, sys, threading, time\n"
        "from cortexmlx.serving import parts\n"
        "def slow(*args, **options):\n"
        "    print('loading', flush=True)\n"
        "    time.sleep(60)\n"
        "parts.load_model = slow\n"
        "from cortexmlx.cli.start import run\n"
        "sys.exit(run(['generate', 'm', '-p', 'hi']))\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"loading\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=10) == 130
        assert process.stderr is not None and process.stderr.read() == b""
