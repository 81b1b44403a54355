"""A small process between the controller and MLX's launcher: it ends everything when its input closes.

The controller can be killed at any moment, and a launcher that loses its input goes on. So the launcher's parent is
this process. It passes its own input on. When that ends, because the controller closed it or is gone, or when the
launcher ends, it ends every process below itself, and removes the folder of their temporary files.

It is run as a file, `python -I supervisor.py FOLDER COMMAND...`, imports nothing but the standard library, and costs
one idle process.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

PATIENCE_SECONDS = 1.0
"""Time between SIGTERM and SIGKILL."""
LONGEST_SECONDS = 6.0
"""When to give up on processes that even SIGKILL does not end: those that wait for a device."""

_PR_SET_CHILD_SUBREAPER = 36


def main(folder: str, command: list[str]) -> int:
    """Run a command until it or the standard input ends, then end all that it started. Return its exit code."""
    wake_reader, wake_writer = os.pipe()
    os.set_blocking(wake_writer, False)
    signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
    for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGCHLD):
        signal.signal(each, _ignore_signal)
    _adopt_orphans()
    try:
        child = subprocess.Popen(command, stdin=subprocess.PIPE)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
        shutil.rmtree(folder, ignore_errors=True)
        return 127
    assert child.stdin is not None
    number = _forward_input(child, child.stdin.fileno(), wake_reader)
    code = child.poll()
    with suppress(OSError):
        _end_descendants()
    shutil.rmtree(folder, ignore_errors=True)
    if code is None:
        return 128 + number if number else 0
    return code if code >= 0 else 128 - code


def _ignore_signal(number: int, frame: object) -> None:
    """Do nothing on a signal: its number is also written to a pipe, which ends a wait."""


def _adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, where the system can (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _forward_input(child: subprocess.Popen[bytes], child_input: int, wake_reader: int) -> int:
    """Copy standard input to the child until either ends, or a signal asks to end. Return the signal's number, or 0."""
    while child.poll() is None:
        readable = select.select([0, wake_reader], [], [])[0]
        if 0 in readable:
            data = os.read(0, 4096)
            if not data:
                return 0
            with suppress(OSError):
                os.write(child_input, data)
        if wake_reader in readable and (numbers := set(os.read(wake_reader, 512)) - {signal.SIGCHLD}):
            return min(numbers)
    return 0


def _end_descendants() -> None:
    """End every descendant of this process: SIGTERM, then SIGKILL. Stopped ones get SIGCONT, so that they notice."""
    family = _descendants()
    for pid in family:
        _send_signal(pid, signal.SIGTERM)
        _send_signal(pid, signal.SIGCONT)
    start = time.monotonic()
    while time.monotonic() - start < LONGEST_SECONDS:
        with suppress(ChildProcessError):  # take the exit codes of those that have ended
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        table = _process_table()
        family = {p: group for p, group in (family | _descendants(table)).items() if table.get(p, (0, -1))[1] == group}
        if not family:
            return
        if time.monotonic() - start > PATIENCE_SECONDS:
            for pid in family:
                _send_signal(pid, signal.SIGKILL)
        time.sleep(0.02)


def _descendants(table: dict[int, tuple[int, int]] | None = None) -> dict[int, int]:
    """Return the living descendants of this process, with their process groups."""
    table = _process_table() if table is None else table
    own_pid = os.getpid()
    family_pids = {own_pid}
    while new_pids := {pid for pid, (parent, _) in table.items() if parent in family_pids and pid not in family_pids}:
        family_pids |= new_pids
    return {pid: table[pid][1] for pid in family_pids - {own_pid}}


def _process_table() -> dict[int, tuple[int, int]]:
    """Return the parent and the process group of every living process."""
    if Path("/proc/self/stat").exists():
        return dict(filter(None, map(_read_proc, filter(str.isdigit, os.listdir("/proc")))))
    with subprocess.Popen(["ps", "-A", "-o", "pid=,ppid=,pgid=,stat="], stdout=subprocess.PIPE) as ps:
        ps_output = ps.communicate()[0].decode(errors="replace")
    return parse_ps(ps_output, excluded_pid=ps.pid)


def parse_ps(ps_output: str, excluded_pid: int) -> dict[int, tuple[int, int]]:
    """Parse the output of `ps`: parent and process group by process id, without zombies and process `excluded_pid`."""
    rows = [line.split() for line in ps_output.splitlines()]
    living_rows = [row for row in rows if len(row) == 4 and not row[3].startswith("Z") and row[0] != str(excluded_pid)]
    return {int(pid): (int(parent), int(group)) for pid, parent, group, _ in living_rows}


def _read_proc(pid: str) -> tuple[int, tuple[int, int]] | None:
    """Read a process's parent and group from /proc; None if it is a zombie or gone."""
    try:
        state, parent, group = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[:3]
    except OSError:
        return None
    return None if state == "Z" else (int(pid), (int(parent), int(group)))


def _send_signal(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process, if it still exists."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
