"""The supervisor ends everything below it, whatever it is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cortexmlx.distributed.launch import supervisor
from support.hosts.launch.processes import alive, commands
from support.patience import soon

STUBBORN = (
    "import os, signal, time; "
    "[signal.signal(s, signal.SIG_IGN) for s in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)]; "
    "os.write(1, b'%d\\n' % os.getpid()); time.sleep(600)"
)


def supervised(folder: Path, *command: str) -> subprocess.Popen[str]:
    """A supervisor with a command."""
    return subprocess.Popen(
        [sys.executable, "-I", supervisor.__file__, str(folder), *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder that a supervisor removes."""
    made = tmp_path / "temporary"
    made.mkdir()
    (made / "a file").touch()
    return made


def test_it_passes_on_the_input_the_output_and_the_exit_code(folder: Path) -> None:
    with supervised(folder, sys.executable, "-c", "print(input()); raise SystemExit(7)") as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("hello\n")
        process.stdin.flush()
        assert process.stdout.read() == "hello\n" and process.wait() == 7
    assert not folder.exists()


@pytest.mark.parametrize("how", ["closed", "terminated"])
def test_it_ends_children_that_ignore_signals_sit_in_other_sessions_or_are_stopped(folder: Path, how: str) -> None:
    script = "import subprocess, sys; " + "; ".join(
        f"subprocess.Popen([sys.executable, '-c', {STUBBORN!r}], start_new_session={apart})" for apart in (True, False)
    )
    with supervised(folder, sys.executable, "-c", f"{script}; {STUBBORN}") as process:
        assert process.stdin is not None and process.stdout is not None
        pids = {int(process.stdout.readline()) for _ in range(3)}
        os.kill(min(pids), signal.SIGSTOP)
        everything = pids | set(commands(process.pid))
        if how == "closed":
            process.stdin.close()
        else:
            process.send_signal(signal.SIGTERM)
        assert process.wait() == (0 if how == "closed" else 128 + signal.SIGTERM)
    assert not alive(everything) and not folder.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives orphans to the supervisor")
def test_it_ends_orphans(folder: Path) -> None:
    script = (
        "import subprocess, sys; "
        f"orphan = subprocess.Popen([sys.executable, '-c', {STUBBORN!r}], start_new_session=True, stdout=-1); "
        "print(orphan.stdout.readline().decode(), flush=True)"
    )
    with supervised(folder, sys.executable, "-c", script) as process:
        assert process.stdout is not None
        orphan = int(process.stdout.readline())
        process.wait()
    assert not alive([orphan]) and not folder.exists()


def test_a_command_that_does_not_exist_is_said(folder: Path) -> None:
    with supervised(folder, "/nowhere/mpirun") as process:
        assert process.stdout is not None
        assert process.stdout.read() == "/nowhere/mpirun: No such file or directory\n"
        assert process.wait() == 127
    assert not folder.exists()


def test_a_signal_that_ended_the_command_is_told_as_a_shell_tells_it(folder: Path) -> None:
    with supervised(folder, sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)") as process:
        assert process.wait() == 137


def test_what_ps_lists_is_read_without_the_dead_and_itself() -> None:
    listed = "    1     0     1 Ss\n  501     1   500 S+\n  502   501   500 Z+\n  503   500   500 R+\n"
    assert supervisor.parse_ps(listed, excluded_pid=503) == {1: (0, 1), 501: (1, 500)}
    mine = supervisor._process_table()[os.getpid()]
    assert mine == (os.getppid(), os.getpgrp())
    assert soon(lambda: os.getpid() in commands(os.getpgrp()))


def test_all_below_are_the_family_whatever_their_groups() -> None:
    me = os.getpid()
    table = {1: (0, 1), me: (1, me), 10: (me, 10), 11: (10, 7), 12: (11, 12), 20: (1, 10)}
    assert supervisor._descendants(table) == {10: 10, 11: 7, 12: 12}
