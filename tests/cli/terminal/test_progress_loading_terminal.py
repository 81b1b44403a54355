"""A download in a real terminal: one bar that moves, and goes away."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from support.cli.terminal import Terminal
from support.models.hub import large_model, serving

PROGRAM = (sys.executable, "-m", "cortexmlx")


@pytest.mark.parametrize(
    ("columns", "lines", "moving"),
    [
        (80, 24, r" of 5.72 MiB · "),
        pytest.param(40, 10, "%", marks=pytest.mark.slow),
        pytest.param(200, 50, " of 5.72 MiB · ", marks=pytest.mark.slow),
    ],
)
def test_a_download_is_one_line_that_moves_until_ctrl_c(columns: int, lines: int, moving: str, tmp_path: Path) -> None:
    """On the real engine, which gets no farther than the download."""
    command = ("generate", "org/tiny", "-p", "hi")
    with serving(tiny=large_model(tmp_path / "tiny", (6_000_000,))) as hub:
        hub.bytes_per_second = 2e5
        there = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
        with Terminal(columns=columns, lines=lines, environment=there, command=command, program=PROGRAM) as terminal:
            terminal.shows(moving)
            seen: set[str] = set()
            while len(seen) <= 4:
                terminal.wait_until(lambda: True, "anything")
                drawn = [line for line in terminal.lines() if line.strip()]
                assert len(drawn) <= 1, "one line, and nothing above it"
                seen |= {*drawn}
                time.sleep(0.05)
            assert all(line.startswith("downloading org/tiny") for line in seen)
            assert columns < 64 or any("KiB/s · " in line and line.rstrip().endswith(" left") for line in seen)
            terminal.type("\x03")
            assert terminal.exit_code() == 130
            said = " ".join(line.strip() for line in terminal.lines() if line.strip())
            assert "downloading" not in said and said.endswith("are kept: run the same command to continue")
        (kept,) = (tmp_path / "home").glob("hub/*/blobs/*.incomplete")
        assert 0 < kept.stat().st_size < 6_000_000
