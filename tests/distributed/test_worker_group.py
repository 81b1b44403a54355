"""Groups of workers: started by the real launchers, with stubs for workers, and ended in every way."""

from __future__ import annotations

import os
import queue
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from cortexmlx.distributed.launch.assignment import package_versions
from cortexmlx.distributed.spec import Hosts
from cortexmlx.distributed.worker_group import WorkerGroup, explain_loss
from cortexmlx.errors import HostLost, HostRefused
from support.hosts.launch.groups import TWO, answers, started, stub
from support.hosts.launch.processes import alive, commands
from support.hosts.mpi import with_mpi
from support.patience import PATIENCE, soon

pytestmark = pytest.mark.usefixtures("temporary")


def test_workers_start_answer_and_end_and_nothing_is_left(temporary: Path) -> None:
    with WorkerGroup.open(TWO, worker=stub("meets"), seconds=PATIENCE) as group:
        assert group.epoch == 1 and group.names == ("this machine, rank 0", "this machine, rank 1")
        assert [channel.name for channel in group.channels] == list(group.names)
        workers = answers(group)
        assert len(set(workers.values())) == 2
        everything = commands(started(group))
        port = next(int(m[1]) for c in everything.values() if (m := re.search(r'"127\.0\.0\.1",(\d+)\]', c)))
        with pytest.raises(ConnectionRefusedError):  # nobody else is awaited
            socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
        assert set(workers.values()) < set(everything) and os.getpid() not in everything
        assert group._processes is not None
        key = group._processes._key
        assert len(key) == 64 and not any(key in command for command in commands().values())
        assert [oct(path.stat().st_mode & 0o777) for path in temporary.iterdir()] == ["0o700"]
    assert not alive(everything) and group.channels == ()
    group.close()


@pytest.mark.usefixtures("news")
def test_a_killed_worker_is_named_with_what_it_wrote_and_the_group_starts_again() -> None:
    with WorkerGroup.open(TWO, worker=stub(), seconds=PATIENCE) as group:
        before = answers(group)
        everything = commands(started(group))
        noticed: queue.SimpleQueue[HostLost] = queue.SimpleQueue()
        group.when_lost(noticed.put)
        os.kill(before[1], signal.SIGKILL)
        said = r"^this machine, rank 1 ended( or closed its connection)? \(exit code -9\)$"
        assert re.match(said, str(noticed.get(timeout=PATIENCE)))
        with pytest.raises(HostLost, match=said) as lost:
            group.channels[1].receive(PATIENCE)
        assert lost.value.host == "this machine, rank 1" and "\n" not in str(lost.value)
        group.reopen()
        assert group.epoch == 2 and not alive(everything)
        assert not set(answers(group).values()) & set(before.values())


@pytest.mark.slow
def test_a_stopped_worker_is_named_and_not_the_one_that_ended_after_it() -> None:
    with WorkerGroup.open(TWO, worker=stub(), seconds=PATIENCE) as group:
        os.kill(answers(group)[1], signal.SIGSTOP)
        with pytest.raises(HostLost, match=r"^this machine, rank 1 sent no heartbeat [^(]*$") as lost:
            group.channels[0].receive(PATIENCE)
        assert lost.value.host == "this machine, rank 1"


def test_a_stopped_worker_and_one_that_ignores_everything_end_with_the_group() -> None:
    with WorkerGroup.open(TWO, worker=stub("deaf"), seconds=PATIENCE) as group:
        everything = commands(started(group))
        os.kill(answers(group)[0], signal.SIGSTOP)
        with pytest.raises(HostLost):
            group.channels[0].receive(0.1)
    assert not alive(everything)


@pytest.mark.usefixtures("news")
def test_a_worker_that_ends_at_once_is_named_with_its_last_line() -> None:
    group = WorkerGroup(TWO, worker=stub("exits"), seconds=PATIENCE)
    with pytest.raises(
        HostLost,
        match=r"\(this machine, rank 1: exit code 1\)\. The workers' last lines: .*rank 1: no module named weights",
    ):
        group.reopen()
    assert group.channels == ()


def test_workers_that_never_join_are_named_when_the_time_is_over() -> None:
    with pytest.raises(HostLost, match="2 of 2 workers did not join in time: this machine, rank 0"):
        WorkerGroup.open(TWO, worker=stub("never-joins"), seconds=1)


def test_another_version_is_refused() -> None:
    with pytest.raises(
        HostRefused, match=f"mlx.*0.0.1.*{package_versions()['mlx']}|mlx.*{package_versions()['mlx']}.*0.0.1"
    ):
        WorkerGroup.open(TWO, worker=stub("another-version"), seconds=PATIENCE)


@pytest.mark.slow
def test_something_that_joins_and_is_no_worker_is_refused() -> None:
    with pytest.raises(HostRefused, match="this machine, rank 0 runs something else"):
        WorkerGroup.open(TWO, worker=stub("strange"), seconds=PATIENCE)


@pytest.mark.usefixtures("news")
def test_garbage_on_the_output_disturbs_nothing_and_the_key_is_not_shown() -> None:
    with WorkerGroup.open(TWO, worker=stub("garbage"), seconds=PATIENCE) as group:
        pids = answers(group)
        assert group._processes is not None
        output = group._processes
        assert soon(lambda: any("..." in line for line in output.last_lines))
        assert not any(output._key in line for line in output.last_lines)
        os.kill(pids[0], signal.SIGKILL)
        with pytest.raises(HostLost) as lost:
            group.channels[0].receive(PATIENCE)
        said = str(lost.value)
        assert said.isprintable() and len(said) < 2000 and output._key not in said


@pytest.mark.slow
def test_two_groups_do_not_know_each_other() -> None:
    with WorkerGroup.open(TWO, worker=stub(), seconds=PATIENCE) as one:
        with WorkerGroup.open(TWO, worker=stub(), seconds=PATIENCE) as other:
            assert not set(answers(one).values()) & set(answers(other).values())
            first = commands(started(other))
        assert not alive(first)
        answers(one)


CONTROLLER = """
import signal, sys, threading
sys.path.insert(0, {tests!r})
from cortexmlx.distributed.spec import Hosts
from cortexmlx.distributed.worker_group import WorkerGroup
from support.hosts.launch.groups import answers, stub
interrupted = threading.Event()
signal.signal(signal.SIGINT, lambda *_: interrupted.set())
group = WorkerGroup.open(Hosts.parse({hosts!r}), worker=stub(), seconds=600)
print(group._processes._supervisor.pid, *answers(group).values(), flush=True)
while not interrupted.wait(0.1):
    pass
answers(group)
print("still there", flush=True)
signal.pause()
"""


def controller(hosts: str, folder: Path) -> subprocess.Popen[str]:
    """A process with a group of stub workers."""
    script = CONTROLLER.format(tests=str(Path(__file__).parents[1]), hosts=hosts)
    environment = os.environ | {"TMPDIR": str(folder)}
    return subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True, env=environment
    )


def test_a_killed_controller_leaves_nothing_and_an_interrupt_reaches_no_worker(temporary: Path) -> None:
    with controller("2", temporary) as process:
        assert process.stdout is not None
        group, *workers = map(int, process.stdout.readline().split())
        everything = set(commands(group)) | set(workers)
        os.killpg(process.pid, signal.SIGINT)
        assert process.stdout.readline() == "still there\n"
        assert alive(everything) == everything and len(everything) == 4
        process.kill()
        assert soon(lambda: not alive(everything))
        assert soon(lambda: not list(temporary.iterdir()))


@pytest.mark.slow
def test_a_killed_supervisor_ends_the_workers_and_the_group_starts_again() -> None:
    with WorkerGroup.open(TWO, worker=stub(), seconds=PATIENCE) as group:
        everything = commands(started(group))
        os.kill(started(group), signal.SIGKILL)
        with pytest.raises(HostLost):
            group.channels[0].receive(PATIENCE)
        assert soon(lambda: not alive(everything))
        group.reopen()
        answers(group)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_killed_or_stopped_a_new_start_leaves_nothing_of_the_old(seed: int) -> None:
    chance = random.Random(seed)
    with WorkerGroup.open(TWO, worker=stub(chance.choice(["none", "deaf"])), seconds=PATIENCE) as group:
        for _ in range(4):
            everything = commands(started(group))
            for victim in chance.sample(sorted(everything), chance.choice([1, 1, 2])):
                os.kill(victim, chance.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP, signal.SIGHUP]))
            group.reopen()
            assert soon(lambda: not alive(everything))  # noqa: B023
            answers(group)


def test_a_start_that_is_called_off_leaves_nothing() -> None:
    seen: list[int] = []

    def check() -> None:
        seen.append(started(group))
        if len(commands(seen[0])) >= 4:
            raise KeyboardInterrupt

    group = WorkerGroup(TWO, worker=stub("never-joins"), seconds=PATIENCE, check=check)
    with pytest.raises(KeyboardInterrupt):
        group.reopen()
    assert not commands(seen[0])


SSH = """#!{python}
import os, pty, sys
words = sys.argv[1:]
if words[0] == "-G":
    print("user me")
    print("hostname 127.0.0.1")
    sys.exit()
assert words[-2] in ("studio-1", "studio-2"), words
with open({log!r}, "a") as log:
    log.write(words[-2] + "\\n")
sys.exit(os.waitstatus_to_exitcode(pty.spawn(["/bin/bash", "-c", words[-1]])))
"""


@pytest.mark.usefixtures("news")
def test_workers_on_other_hosts_start_by_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ssh is a program of the test that runs the command here, in a terminal, as `ssh -tt` does."""
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "ssh").write_text(SSH.format(python=sys.executable, log=str(tmp_path / "log")))
    (tools / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    file = tmp_path / "hosts.json"
    file.write_text('[{"ssh": "studio-1", "ips": ["192.0.2.1"]}, {"ssh": "studio-2", "ips": ["192.0.2.2"]}]')
    with WorkerGroup.open(Hosts.parse(str(file)), worker=stub(), seconds=PATIENCE) as group:
        pids = answers(group)
        assert group.names == ("studio-1, rank 0", "studio-2, rank 1")
        assert sorted((tmp_path / "log").read_text().split()) == ["studio-1", "studio-2"]
        assert group._processes is not None
        key = group._processes._key
        assert not any(key in command for command in commands().values())
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(HostLost, match=r"studio-2, rank 1 .*(exit code|closed its connection)"):
            group.channels[1].receive(PATIENCE)
    assert soon(lambda: not alive(pids.values()))


@pytest.fixture
def mpi_here(tmp_path: Path) -> Iterator[None]:
    with with_mpi(tmp_path / "mpi"):
        yield


@pytest.mark.usefixtures("mpi_here", "news")
def test_workers_meet_by_mpi_and_a_killed_one_is_named() -> None:
    with WorkerGroup.open(Hosts.parse("3:mpi"), worker=stub("meets"), seconds=PATIENCE) as group:
        workers = answers(group)
        everything = set(commands(started(group))) | set(workers.values())
        assert group._processes is not None
        assert not any(group._processes._key in command for command in commands().values())
        folder = group._processes._folder
        os.kill(workers[2], signal.SIGKILL)
        with pytest.raises(HostLost, match=r"this machine, rank 2 .*\(signal 9\)"):
            group.channels[2].receive(PATIENCE)
        group.reopen()
        assert not alive(everything) and not folder.exists()
        answers(group)


@pytest.mark.slow
@pytest.mark.usefixtures("mpi_here")
def test_a_killed_controller_leaves_nothing_of_mpi(temporary: Path) -> None:
    with controller("2:mpi", temporary) as process:
        assert process.stdout is not None
        group, *workers = map(int, process.stdout.readline().split())
        everything = set(commands(group)) | set(workers)
        process.kill()
        assert soon(lambda: not alive(everything))


# -- What is said of workers that were lost: who is blamed, and that nobody is where no worker failed -----------------


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
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
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
