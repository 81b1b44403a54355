"""A worker by itself. With its group it is tested in `test_worker_group.py`, with a model in `tests/distributed`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cortexmlx.distributed.launch.assignment import CONTROLLER_LOST, MEET, READY, WorkerAssignment, package_versions
from cortexmlx.distributed.links.handshake import new_key
from cortexmlx.distributed.links.link import WorkerLink
from cortexmlx.distributed.links.listener import Listener
from cortexmlx.distributed.worker import init_mlx_group
from cortexmlx.errors import HostRefused
from support.patience import PATIENCE


def test_started_by_hand_it_says_who_starts_it() -> None:
    command = [sys.executable, "-m", "cortexmlx.distributed.worker"]
    done = subprocess.run(command, input="", capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stdout == ""
    assert "workers are started by cortexmlx, with --hosts" in done.stderr and "Traceback" not in done.stderr


def ended_worker(end: Callable[[WorkerLink], None]) -> subprocess.Popen[str]:
    """A worker that ended after it had met the others, nobody, and `end` of its link."""
    key, versions_here = new_key(), package_versions()
    listener = Listener(key, 1, 1, versions_here, ["127.0.0.1"])
    task = WorkerAssignment(tuple(listener.addresses), 1, 1, "ring", PATIENCE)
    name, _, value = task.environment_entry().partition("=")
    with subprocess.Popen(
        [sys.executable, "-m", "cortexmlx.distributed.worker"],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {name: value, "MLX_RANK": "0"},
    ) as process:
        assert process.stdin is not None
        process.stdin.write(f"{key.hex()}\n")
        process.stdin.flush()

        def check() -> None:
            assert process.poll() is None, process.stderr and process.stderr.read()

        (link,) = listener.accept(time.monotonic() + PATIENCE, check=check)
        listener.close()
        link.send(MEET)
        assert link.receive(PATIENCE) == READY
        end(link)
        process.wait(PATIENCE)
        link.close()
    return process


def test_the_exit_code_tells_a_lost_controller_from_a_failure() -> None:
    assert ended_worker(WorkerLink.close).returncode == CONTROLLER_LOST
    assert ended_worker(lambda link: link.send(b"no call")).returncode == 1


def test_one_rank_meets_nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The launcher writes an empty host file for it."""
    (tmp_path / "empty").write_text("\n")
    monkeypatch.setenv("MLX_HOSTFILE", str(tmp_path / "empty"))
    monkeypatch.setenv("MLX_RANK", "0")
    group = init_mlx_group(WorkerAssignment((), 1, 1, "ring", 1.0), 0)
    assert (group.rank(), group.size()) == (0, 1)


@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac may have it")
def test_a_backend_that_this_mlx_has_not_is_refused_with_what_it_needs() -> None:
    with pytest.raises(HostRefused, match=r"this MLX cannot use jaccl-ring on this machine: it needs macOS 26\.2"):
        init_mlx_group(WorkerAssignment((), 1, 2, "jaccl-ring", 1.0), 0)


def test_ranks_that_cannot_meet_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLX_HOSTFILE", raising=False)
    with pytest.raises(HostRefused, match="the ranks cannot reach each other by ring"):
        init_mlx_group(WorkerAssignment((), 1, 2, "ring", 1.0), 0)
