"""What is kept of the workers' output, and what the launchers say of their end."""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cortexmlx.distributed.launch import processes as module
from cortexmlx.distributed.launch.assignment import CONTROLLER_LOST
from cortexmlx.distributed.launch.processes import WorkerProcesses
from cortexmlx.distributed.spec import Host, Hosts
from cortexmlx.errors import HostRefused
from support.patience import soon

KEY = bytes(range(32))
TWO = Hosts.parse("2")
DASHES = "-" * 74


@contextmanager
def running(
    program: str, monkeypatch: pytest.MonkeyPatch, folder: Path, hosts: Hosts = TWO
) -> Iterator[WorkerProcesses]:
    """Processes whose launcher is a Python program of the test."""
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr(module, "launch_command", lambda *_: [sys.executable, "-c", program])
    processes = WorkerProcesses(hosts, [], KEY, [])
    try:
        yield processes
    finally:
        processes.close()
        assert processes.has_ended and list(folder.iterdir()) == []


def said(output: str, monkeypatch: pytest.MonkeyPatch, folder: Path, hosts: Hosts = TWO) -> WorkerProcesses:
    """Processes that ended after they wrote this."""
    with running(f"import sys; sys.stdout.write({output!r})", monkeypatch, folder, hosts) as processes:
        assert soon(lambda: processes.has_ended)
    return processes


def test_the_key_comes_by_the_standard_input(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with running("print(len(input()), 'digits')", monkeypatch, tmp_path) as processes:
        assert soon(lambda: processes.last_lines == ["64 digits"])


def test_the_key_is_not_kept_when_a_terminal_shows_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    processes = said(f"{KEY.hex()}\r\nafter\n", monkeypatch, tmp_path)
    assert processes.last_lines == ["...", "after"]


def test_little_is_kept_and_nothing_that_moves_a_cursor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with running(
        "print('x' * 30_000_000, '\\033[2J\\033[31mred\\033[0m\\a'); print('y' * 10_000_000)", monkeypatch, tmp_path
    ) as p:
        assert soon(lambda: p.has_ended)
    assert len(p.last_lines) == 2 and max(map(len, p.last_lines)) == 400
    assert all(line.isprintable() for line in p.last_lines)
    assert p.last_lines[0].endswith("x  [2Jred") and set(p.last_lines[1]) == {"y"}


def test_only_the_last_lines_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    processes = said("".join(f"{n}\n" for n in range(1000)), monkeypatch, tmp_path)
    assert processes.last_lines == [str(n) for n in range(940, 1000)]


def test_the_end_of_a_rank_is_read_from_what_mlx_launch_writes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = (
        "rank 1: no weights\n\033[33m[WARN] Node with rank 1 exited with code -9 \033[0m\n"
        "\033[33m[WARN] Node with rank 0 was killed \033[0m\n"
    )
    processes = said(text, monkeypatch, tmp_path)
    assert processes.failed_ranks() == {1: "exit code -9"}
    assert processes.last_lines == ["rank 1: no weights"]


def test_a_rank_that_ended_with_exit_code_0_is_read_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = "no weights\n\033[32m[INFO] Node with rank 1 completed \033[0m\n"
    processes = said(text, monkeypatch, tmp_path)
    assert processes.failed_ranks() == {1: "exit code 0"} and processes.last_lines == ["no weights"]


def test_the_end_of_a_rank_is_read_from_what_mpirun_writes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    killed = (
        f"{DASHES}\nmpirun noticed that process rank 1 with PID 0 on node vm exited on signal 9 (Killed).\n{DASHES}\n"
    )
    processes = said("rank 1: no weights\n" + killed, monkeypatch, tmp_path)
    assert processes.failed_ranks() == {1: "signal 9"}
    assert processes.last_lines == ["rank 1: no weights"]
    exits = (
        f"{DASHES}\nmpirun detected that one or more processes exited with non-zero status:\n\n"
        f"  Process name: [[44079,1],0]\n  Exit code:    3\n{DASHES}\n"
    )
    assert said(exits, monkeypatch, tmp_path).failed_ranks() == {0: "exit code 3"}


def test_a_rank_that_ended_because_others_did_is_not_blamed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The controller ends every link when one is lost, and the launcher may notice that rank first."""
    after = f"[WARN] Node with rank 0 exited with code {CONTROLLER_LOST}\n"
    processes = said(f"{after}[WARN] Node with rank 1 exited with code -9\n", monkeypatch, tmp_path)
    assert processes.failed_ranks() == {1: "exit code -9"}
    text = "[WARN] Node with rank 1 exited with code {}\n[WARN] Node with rank 0 exited with code -15\n"
    assert said(text.format(-9), monkeypatch, tmp_path).failed_ranks() == {1: "exit code -9"}, "by the launcher"
    assert said(text.format(-15), monkeypatch, tmp_path).failed_ranks() == {1: "exit code -15"}, "somebody's kill"
    program = f"import sys; print({text.format(-15)!r}); sys.exit({128 + signal.SIGTERM})"
    with running(program, monkeypatch, tmp_path) as ended:
        assert soon(lambda: ended.has_ended) and ended.failed_ranks() == {}, "the launcher was ended"
    processes = said(after, monkeypatch, tmp_path)
    assert processes.failed_ranks() == {} and processes.last_lines == []
    by_mpi = (
        f"{DASHES}\nmpirun detected that one or more processes exited with non-zero status:\n\n"
        f"  Process name: [[44079,1],0]\n  Exit code:    {CONTROLLER_LOST}\n{DASHES}\n"
    )
    processes = said(by_mpi, monkeypatch, tmp_path)
    assert processes.failed_ranks() == {} and processes.last_lines == []


def test_what_the_ring_writes_when_a_neighbour_is_lost_does_not_hide_the_cause(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Every rank writes it a dozen times, and two ranks' pieces of a line may mix."""
    ring = "[ring] Sending to socket 7 failed with errno 32\n" * 70 + "[ring] [ring] Socket 5 was closed by the peer\n"
    ring += "[ring] Too many send/recv errors. Failing pending tasks...\n"
    ends = "[WARN][WARN] Node with rank 2 exited with code -15\n Node with rank 1 exited with code -15\n[ring] \n"
    cause = "[METAL] Command buffer execution failed: Insufficient Memory"
    assert said(f"{cause}\n{ring}{ends}", monkeypatch, tmp_path).last_lines == [cause]
    assert said(f"{ring}[ring] {cause}\n", monkeypatch, tmp_path).last_lines == [f"[ring] {cause}"]
    alone = said(ring, monkeypatch, tmp_path).last_lines
    assert len(alone) == 60 and alone[-1].endswith("Failing pending tasks...")


THREAD_FAILED = """Exception in thread Thread-{0} (_thread_fn):
Traceback (most recent call last):
  File "/lib/python3.11/threading.py", line 1045, in _bootstrap_inner
    self.run()
  File "/lib/python3.11/site-packages/mlx/_distributed_utils/launch.py", line 228, in _thread_fn
    command.terminate()
    ^^^^
{1}
"""
"""What `mlx.launch` writes when it fails in the thread that runs a rank."""


def test_a_traceback_of_the_launcher_is_not_the_workers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own = ["Traceback (most recent call last):", '  File "worker.py", line 1, in main', "ValueError: no weights"]
    first, end = "\n".join(own) + "\n", "[WARN] Node with rank 1 exited with code -9\n"
    failed = "".join(THREAD_FAILED.format(n, f"subprocess.CalledProcessError: Command '{'x' * 500}'") for n in range(9))
    two = "".join(line * 2 for line in THREAD_FAILED.format(1, "OSError: no").splitlines(keepends=True))
    for text in (first + end + failed, end + failed + first, first + end + two, end + two + first):
        processes = said(text, monkeypatch, tmp_path)
        assert processes.last_lines == [line.strip() for line in own]
        assert processes.failed_ranks() == {1: "exit code -9"} and processes.launcher_failure is None
    begun, over = failed[: failed.index("    self.run")], failed[failed.index("    self.run") :]
    assert said(begun + end + over, monkeypatch, tmp_path).failed_ranks() == {1: "exit code -9"}, "in between"
    thread = "Exception in thread Thread-1 (decode):\n" + first
    assert len(said(thread, monkeypatch, tmp_path).last_lines) == 4, "a worker's thread"


def test_a_failure_of_the_launcher_itself_is_no_rank_s(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It ends the other ranks, and tells of these alone."""
    failed = THREAD_FAILED.format(2, "OSError: [Errno 24] Too many open files")
    processes = said(f"{failed}[WARN] Node with rank 0 exited with code -15\n", monkeypatch, tmp_path)
    assert processes.failed_ranks() == {} and processes.last_lines == []
    assert processes.launcher_failure == "OSError: [Errno 24] Too many open files"
    processes = said(f"{failed}[WARN] Node with rank 0 exited with code 1\n", monkeypatch, tmp_path)
    assert processes.failed_ranks() == {0: "exit code 1"}


@pytest.mark.parametrize(("code", "number"), [(0, None), (9, None), (137, 9), (255, None)])
def test_a_signal_that_ended_the_launcher_is_known(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int, number: int | None
) -> None:
    with running(f"raise SystemExit({code})", monkeypatch, tmp_path) as processes:
        assert soon(lambda: processes.has_ended)
        assert processes.launcher_signal == number
    with running("input(); input()", monkeypatch, tmp_path) as processes:
        assert processes.launcher_signal is None
        processes._supervisor.terminate()
        assert soon(lambda: processes.has_ended) and processes.launcher_signal == signal.SIGTERM


def test_a_login_that_fails_is_told_with_the_next_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = "[WARN] Node with rank 1 exited with code 255\n"
    assert said(text, monkeypatch, tmp_path).failed_ranks() == {1: "exit code 255"}, "no ssh starts a process here"
    hosts = Hosts((Host("127.0.0.1", ("10.0.0.1",)), Host("studio-2", ("10.0.0.2",))), "ring")
    told = said(text, monkeypatch, tmp_path, hosts).failed_ranks()
    assert told == {1: "exit code 255: ssh failed. `ssh studio-2 true` must work without a question"}


def test_what_a_launcher_says_is_shown_if_there_is_nothing_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    processes = said(f"{DASHES}\nThere are not enough slots available\n{DASHES}\n", monkeypatch, tmp_path)
    assert processes.last_lines == ["There are not enough slots available"]


def test_news_are_awaited_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "_NEWS_SECONDS", 0.2)
    with running("import time; time.sleep(600)", monkeypatch, tmp_path) as processes:
        processes.await_launcher_exit()
        pauses: list[float] = []
        monkeypatch.setattr(time, "sleep", pauses.append)
        processes.await_launcher_exit()
        assert pauses == []
        monkeypatch.undo()


@pytest.mark.parametrize("name", ["two words", "a$(b)", "it's", "a;b", "star*"])
def test_a_folder_that_a_shell_would_misread_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    """The scripts of `mlx.launch` do not quote it."""
    (tmp_path / name).mkdir()
    with running("input()", monkeypatch, tmp_path / name) as processes:
        assert processes._folder.parent == Path("/tmp")
    assert not processes._folder.exists()


def test_a_launcher_that_does_not_exist_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(module, "launch_command", lambda *_: ["/nowhere/mpirun"])
    processes = WorkerProcesses(TWO, [], KEY, [])
    processes.await_launcher_exit()
    processes.close()
    assert processes.last_lines == ["/nowhere/mpirun: No such file or directory"]
    assert list(tmp_path.iterdir()) == []


def test_a_refused_start_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    hosts = Hosts(Hosts.parse("2").hosts, "jaccl")
    monkeypatch.setattr(module, "core_limits", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        WorkerProcesses(hosts, [], KEY, [])
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(HostRefused, match="no Python program"):
        WorkerProcesses(hosts, [], KEY, [])
    assert list(tmp_path.iterdir()) == []
