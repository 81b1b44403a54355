"""Opening an engine for a command: closed after it, and a progress bar only where a person looks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cortexmlx.cli.engine import open_engine
from cortexmlx.core.config import EngineConfig
from cortexmlx.errors import EngineClosed
from support.models.hub import large_model, serving
from support.models.tiny import write_tiny
from support.patience import PATIENCE


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
        "from cortexmlx.core import in_process_model\n"
        "def slow(*args, **options):\n"
        "    print('loading', flush=True)\n"
        "    time.sleep(10_000)\n"
        "in_process_model.load_model = slow\n"
        "from cortexmlx.cli.start import run\n"
        "sys.exit(run(['generate', 'm', '-p', 'hi']))\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"loading\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=PATIENCE) == 130
        assert process.stderr is not None and process.stderr.read() == b""


COMMAND = "import sys; from cortexmlx.cli.start import run; sys.exit(run(['generate', 'org/tiny', '-p', 'hi']))"
APP = "from cortexmlx import Engine; Engine('org/tiny')"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "ends", "says"),
    [
        (COMMAND, 130, "are kept: run the same command to continue\n"),
        (APP, -signal.SIGINT, "KeyboardInterrupt\n"),
    ],
)
def test_ctrl_c_stops_a_download_at_once_and_keeps_what_came(code: str, ends: int, says: str, tmp_path: Path) -> None:
    """Two seconds' worth of it is there when somebody presses Ctrl-C; the rest would take a minute."""
    with serving(tiny=large_model(tmp_path / "tiny", (6_000_000,))) as hub:
        hub.bytes_per_second = 1e5
        environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
        environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
        with subprocess.Popen(
            [sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, env=environment
        ) as process:
            while hub.sent < 100_000:
                time.sleep(0.02)
                assert process.poll() is None
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=PATIENCE) == ends
            assert process.stderr is not None and process.stderr.read().endswith(says)
        (kept,) = (tmp_path / "home").glob("hub/*/blobs/*.incomplete")
        assert 0 < kept.stat().st_size < 6_000_000


@pytest.mark.slow
def test_a_model_that_is_given_up_while_it_is_loaded_is_gone_before_the_old_one_is_there_again(tmp_path: Path) -> None:
    """Both at once may be more than memory holds, and the engine's thread goes on to the next word of its progress."""
    code = (
        "import signal, sys, threading, time\n"
        "from cortexmlx.cli.engine import ReplaceableEngine\n"
        "from cortexmlx.types.progress import Progress\n"
        "from cortexmlx.core import in_process_model\n"
        "from cortexmlx.core.config import EngineConfig\n"
        "load, said = in_process_model.load_model, []\n"
        "def slow(model, *, on_progress, **options):\n"
        "    if model != sys.argv[1]:\n"
        "        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)\n"
        "        time.sleep(0.3)\n"
        "        said.append('given up')\n"
        "        on_progress(Progress('loading', 1, 2))\n"
        "        said.append('loaded')\n"
        "    said.append(f'loading {model == sys.argv[1]}')\n"
        "    return load(model, on_progress=on_progress, **options)\n"
        "in_process_model.load_model = slow\n"
        "with ReplaceableEngine(EngineConfig(sys.argv[1], kv_memory=2**20)) as host:\n"
        "    try:\n"
        "        host.replace_engine(EngineConfig(sys.argv[2], kv_memory=2**20))\n"
        "    except KeyboardInterrupt:\n"
        "        said.append(host.engine.generate([1, 2]).finish_reason.value)\n"
        "print(said)\n"
    )
    folders = [str(write_tiny(tmp_path / name)) for name in ("one", "two")]
    done = subprocess.run([sys.executable, "-c", code, *folders], capture_output=True, text=True, check=False)
    assert done.stdout == "['loading True', 'given up', 'loading True', 'length']\n", done.stderr
