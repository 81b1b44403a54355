"""Groups of stub workers for tests."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from cortexmlx.distributed.spec import Hosts
from cortexmlx.distributed.worker_group import WorkerGroup

TWO = Hosts.parse("2")

STUB = Path(__file__).with_name("stub_worker.py")


def stub(fault: str = "none") -> list[str]:
    """The command line of a stub worker."""
    return [sys.executable, "-P", str(STUB), fault]


def started(group: WorkerGroup) -> int:
    """The process group of what a group of workers started."""
    assert group._processes is not None
    return group._processes._supervisor.pid


def answers(group: WorkerGroup) -> dict[int, int]:
    """Ask every worker, and return the process of each rank."""
    found = {}
    for rank, channel in enumerate(group.channels):
        channel.send(b"hello")
        told: list[Any] = channel.receive(60).split()
        assert int(told[0]) == rank and told[2] == b"hello"
        found[rank] = int(told[1])
    return found
