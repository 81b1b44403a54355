"""What the processes of groups hold, so that it can be seen to be gone when they are: ports, files, shared memory."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from support.hosts.launch.processes import commands, is_ours

_LISTENS = "0A"
_FOLDER = re.compile(r"/\S*cortexmlx-hosts-[^\s/]+")


@dataclass
class Held:
    """What some processes were seen to hold, at several looks."""

    processes: set[int] = field(default_factory=set)
    ports: set[int] = field(default_factory=set)
    files: set[Path] = field(default_factory=set)
    """Folders for temporary files, open files in those for all, and shared memory."""

    def look(self, without: Iterable[int]) -> None:
        """Add what all of our processes hold now but these, and but what this process has itself, its output say."""
        now = {pid: line for pid, line in commands().items() if pid not in set(without) and is_ours(pid)}
        self.processes |= set(now)
        self.ports |= _ports(now)
        for pid, line in now.items():
            self.files |= {Path(found) for found in _FOLDER.findall(line)} | (_files(pid) - _files(os.getpid()))

    def left(self) -> list[str]:
        """What is still there, in words."""
        alive = commands()
        listening = set(_listening().values())
        return [
            *(f"process {pid}: {alive[pid]}" for pid in sorted(self.processes & set(alive)) if is_ours(pid)),
            *(f"port {port}" for port in sorted(self.ports & listening)),
            *(f"file {path}" for path in sorted(self.files) if path.exists()),
        ]


def _listening() -> dict[str, int]:
    """The ports on which somebody listens, by the inodes of the sockets."""
    found = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for row in Path(table).read_text().splitlines()[1:]:
            words = row.split()
            if words[3] == _LISTENS:
                found[words[9]] = int(words[1].rpartition(":")[2], 16)
    return found


def _ports(pids: Iterable[int]) -> set[int]:
    listening = _listening()
    inodes = {match[1] for pid in pids for name in _open(pid) if (match := re.fullmatch(r"socket:\[(\d+)\]", name))}
    return {listening[inode] for inode in inodes & set(listening)}


def _files(pid: int) -> set[Path]:
    """Files in folders for temporary ones that a process has open or mapped."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        maps = []
    mapped = [row.split(maxsplit=5)[5] for row in maps if len(row.split(maxsplit=5)) == 6]
    names = [name for name in (*mapped, *_open(pid)) if name.startswith(("/tmp/", "/dev/shm/"))]
    return {Path(name) for name in names if not name.endswith(" (deleted)") and Path(name).is_file()}


def _open(pid: int) -> list[str]:
    names = []
    with suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):  # it was closed meanwhile, such as that of this very list
                names.append(os.readlink(f"/proc/{pid}/fd/{name}"))
    return names
