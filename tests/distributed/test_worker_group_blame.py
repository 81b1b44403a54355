"""What is said of workers that were lost: who is blamed, and that nobody is where no worker failed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from cortexmlx.distributed.worker_group import WorkerGroup, explain_loss
from cortexmlx.errors import HostLost
from support.hosts.launch.groups import TWO, started, stub
from support.hosts.launch.processes import alive, commands
from support.patience import PATIENCE, soon

pytestmark = pytest.mark.usefixtures("temporary")


@dataclass
class Told:
    """What the launcher has told of workers."""

    ended: dict[int, str]
    last_lines: tuple[str, ...] = ()
    orphaned: tuple[int, ...] = ()
    launcher_signal: int | None = None
    launcher_failure: str | None = None

    def await_launcher_exit(self) -> None:
        """It is all there."""

    def failed_ranks(self) -> dict[int, str]:
        return self.ended

    def orphaned_ranks(self) -> set[int]:
        return set(self.orphaned)


@pytest.mark.parametrize(
    ("ended", "host", "said"),
    [
        ({1: "exit code -9"}, "b", "b is gone (exit code -9)"),
        ({0: "exit code 1", 1: "exit code -9"}, "b", "b is gone (exit code -9)"),
        ({0: "exit code 1"}, "b", "a ended (exit code 1)"),
        ({0: "exit code 1"}, None, "None is gone (a: exit code 1)"),
        ({}, "b", "b is gone"),
    ],
)
def test_the_worker_that_ended_first_is_blamed(ended: dict[int, str], host: str | None, said: str) -> None:
    error = explain_loss(HostLost(f"{host} is gone", host=host), Told(ended), ("a", "b"))  # type: ignore[arg-type]
    assert str(error) == said and error.host == (said[0] if host else "a")


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (Told({}, launcher_signal=9), "the launcher of the workers on this machine was ended (signal 9)"),
        (Told({}, launcher_failure="OSError: no"), "the launcher of the workers on this machine failed: OSError: no"),
        (Told({}, orphaned=(0,)), None),
        (Told({}, orphaned=(1,)), "the workers heard nothing of this process for 7 s: it was stopped, or the network"),
        (Told({0: "signal 9"}, (), (1,), 15, "OSError: no"), "a is gone (signal 9)"),
    ],
)
def test_no_worker_is_blamed_for_what_befell_the_launcher_or_this_process(told: Told, said: str | None) -> None:
    """The link of rank 0 was ended here, that of rank 1 by the worker."""
    lost = HostLost("a is gone", host="a")
    error = explain_loss(lost, told, ("a", "b"), lambda rank: rank == 1)  # type: ignore[arg-type]
    assert str(error).startswith(said or "a is gone")
    assert error.host == (None if said and told.ended == {} else "a")


@pytest.mark.usefixtures("news")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("which", ["mlx_launch.py", "supervisor.py"])
def test_no_worker_is_blamed_when_a_launcher_is_ended(which: str, number: signal.Signals) -> None:
    with WorkerGroup.open(TWO, worker=stub(), seconds=PATIENCE) as group:
        everything = commands(started(group))
        words = {pid: command.split("--hostfile")[0] for pid, command in everything.items()}
        pid = (
            started(group)
            if which == "supervisor.py"
            else next(p for p in words if which in words[p] and p != started(group))
        )
        os.kill(pid, number)
        for channel in group.channels:
            with pytest.raises(HostLost, match=rf"^the launcher of .* ended \(signal {number:d}\)$") as lost:
                channel.receive(PATIENCE)
            assert lost.value.host is None
        assert soon(lambda: not alive(everything))


def test_a_worker_that_ends_with_exit_code_0_is_not_awaited() -> None:
    with pytest.raises(HostLost, match=r"\(this machine, rank 1: exit code 0\)"):
        WorkerGroup.open(TWO, worker=stub("exits-with-0"), seconds=PATIENCE)


STOPPED = """
import os, subprocess, sys
sys.path.insert(0, {tests!r})
from cortexmlx.errors import HostLost
from cortexmlx.distributed.worker_group import WorkerGroup
from support.hosts.launch.groups import TWO, answers, stub
with WorkerGroup.open(TWO, worker=stub(), seconds=600) as group:
    print(*answers(group).values(), flush=True)
    for channel in group.channels:
        try:
            channel.receive(60)
        except HostLost as lost:
            print(lost.host, lost, flush=True)
"""


@pytest.mark.slow
def test_no_worker_is_blamed_when_this_process_was_stopped(temporary: Path) -> None:
    """As Ctrl-Z does, or a computer that sleeps: the workers end by themselves meanwhile."""
    script = STOPPED.format(tests=str(Path(__file__).parents[1]))
    environment = os.environ | {"TMPDIR": str(temporary)}
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        workers = [int(pid) for pid in process.stdout.readline().split()]
        process.send_signal(signal.SIGSTOP)
        assert len(workers) == 2 and soon(lambda: not alive(workers))
        time.sleep(1)  # the launcher looks at each worker ten times a second
        process.send_signal(signal.SIGCONT)
        said = process.stdout.read().splitlines()
    assert len(said) == 2 and all(line.startswith("None the workers heard nothing of this process") for line in said)
