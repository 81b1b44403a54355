"""MLX's launcher with another wait."""

from __future__ import annotations

import os
import select
import time

import pytest
from mlx._distributed_utils import launch

from cortexmlx.distributed.launch import mlx_launch
from cortexmlx.distributed.launch.mlx_launch import LONGEST_SECONDS, select_without_write_wakeups


def test_a_pipe_that_can_be_written_to_ends_no_wait() -> None:
    """MLX's own wait would end at once."""
    silent, written = os.pipe(), os.pipe()
    try:
        start = time.monotonic()
        assert select_without_write_wakeups([silent[0]], [written[1]], [], 1.0) == ([], [written[1]], [])
        assert time.monotonic() - start >= LONGEST_SECONDS * 0.9
        os.write(silent[1], b"x")
        assert select_without_write_wakeups([silent[0]], [], [], 600.0) == ([silent[0]], [], [])
        assert select_without_write_wakeups([], [], [], 0) == ([], [], [])
    finally:
        for end in (*silent, *written):
            os.close(end)


def test_it_takes_the_place_of_what_the_launcher_waits_with(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch.select is select.select, "MLX waits in another way now: see whether it still takes a core"
    monkeypatch.setattr(launch, "select", launch.select)  # put back afterwards
    monkeypatch.setattr("sys.argv", ["mlx.launch", "--print-python"])
    monkeypatch.setattr(launch, "log", launch.log)
    mlx_launch.main()
    assert launch.select is select_without_write_wakeups
    assert capsys.readouterr().err == ""
    launch.log(False, "Running", "a command")
    launch.log(False, "Node with rank 1 completed")
    launch.log(True, "Connecting")
    said = capsys.readouterr().err
    assert "Running" not in said and "[INFO] Node with rank 1 completed" in said and "Connecting" in said
