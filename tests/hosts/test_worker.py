"""A worker by itself. With its group it is tested in `test_worker_group.py`, with a model in `tests/serving/hosted`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cortexmlx.errors import HostRefused
from cortexmlx.hosts.launch.assignment import Assignment
from cortexmlx.hosts.worker import meet_the_others


def test_started_by_hand_it_says_who_starts_it() -> None:
    command = [sys.executable, "-m", "cortexmlx.hosts.worker"]
    done = subprocess.run(command, input="", capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stdout == ""
    assert "workers are started by cortexmlx, with --hosts" in done.stderr and "Traceback" not in done.stderr


def test_one_rank_meets_nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The launcher writes an empty host file for it."""
    (tmp_path / "empty").write_text("\n")
    monkeypatch.setenv("MLX_HOSTFILE", str(tmp_path / "empty"))
    monkeypatch.setenv("MLX_RANK", "0")
    group = meet_the_others(Assignment((), 1, 1, "ring", 1.0), 0)
    assert (group.rank(), group.size()) == (0, 1)


@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac may have it")
def test_a_backend_that_this_mlx_has_not_is_refused_with_what_it_needs() -> None:
    with pytest.raises(HostRefused, match=r"this MLX cannot use jaccl-ring on this machine: it needs macOS 26\.2"):
        meet_the_others(Assignment((), 1, 2, "jaccl-ring", 1.0), 0)


def test_ranks_that_cannot_meet_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLX_HOSTFILE", raising=False)
    with pytest.raises(HostRefused, match="the ranks cannot reach each other by ring"):
        meet_the_others(Assignment((), 1, 2, "ring", 1.0), 0)
