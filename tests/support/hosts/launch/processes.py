"""Which processes of this machine are alive, asked of `ps`."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from pathlib import Path


def commands(group: int | None = None) -> dict[int, str]:
    """The command line of every living process, or of those in a process group."""
    asked = subprocess.run(["ps", "-A", "-ww", "-o", "pid=,pgid=,stat=,args="], capture_output=True, check=True)
    rows = [line.split(maxsplit=3) for line in asked.stdout.decode(errors="replace").splitlines()]
    alive = [row for row in rows if len(row) == 4 and not row[2].startswith("Z")]
    return {int(pid): args for pid, of, _, args in alive if group in (None, int(of))}


WORKER = "-m cortexmlx.distributed.worker"
"""What the command lines of workers have."""


def workers(before: Iterable[int] = ()) -> list[int]:
    """The processes of engines' workers by the order in which they were started, without those that were there before,
    and those that other programs started: another run of the tests beside this one may have workers, too.
    """
    new = {pid: line for pid, line in commands().items() if pid not in before}
    found = [pid for pid, line in new.items() if WORKER in line and "mpirun" not in line]
    return sorted(pid for pid in found if is_ours(pid))


_MARK = "TESTS_OF_PROCESS"
os.environ[_MARK] = str(os.getpid())  # all that is started from now on inherits it


def is_ours(pid: int) -> bool:
    """Whether this process started another one, or one of those did. Where the system does not tell, it is taken to
    have.
    """
    try:
        return f"{_MARK}={os.getpid()}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except FileNotFoundError:
        return not Path("/proc/self/environ").exists()
    except OSError:
        return False


def alive(pids: Iterable[int]) -> set[int]:
    """Those of some processes that are alive."""
    return set(pids) & set(commands())
